"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009), as published: the Python or the binary version, packed or unpacked.

Each has 50,000 training and 10,000 test images of 32x32, in rows of 3,072 bytes, a colour plane after the other. Both
versions give the same images, labels and order as torchvision's, and so the same shards. The test part becomes val, as
it is the held-out part that is published. Holds all images in memory (180 MB).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from data_shards.errors import UserError
from data_shards.packing.sources.base import ArrayImages, ImageSet, Source, SplitName
from data_shards.packing.sources.published.plain_pickle import read_plain_pickle
from data_shards.packing.sources.tree import Tree

CifarLabels = Literal["fine", "coarse"]
_SIDE = 32
_PIXEL_BYTES = 3 * _SIDE**2


@dataclass(frozen=True)
class _Layout:
    name: str
    folder: str  # in its archive
    train: tuple[str, ...]
    test: str
    classes: str  # the file with the names


_LAYOUTS = (
    _Layout(
        "cifar10",
        "cifar-10-batches-py",
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        "test_batch",
        "batches.meta",
    ),
    _Layout(
        "cifar10",
        "cifar-10-batches-bin",
        tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        "test_batch.bin",
        "batches.meta.txt",
    ),
    _Layout("cifar100", "cifar-100-python", ("train",), "test", "meta"),
    _Layout("cifar100", "cifar-100-binary", ("train.bin",), "test.bin", "{}_label_names.txt"),
)
ARCHIVES = ("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz", "cifar-100-python.tar.gz", "cifar-100-binary.tar.gz")
FOLDERS = tuple(layout.folder for layout in _LAYOUTS)


def cifar_source(tree: Tree, *, labels: CifarLabels = "fine") -> Source:
    """The set that is in `tree`. Raises UserError for a part that is missing or not as published."""
    rows = {path.rpartition("/")[2]: row for row, path in enumerate(tree.names)}
    folders = {path.rpartition("/")[0].rpartition("/")[2] for path in tree.names}
    layout = next(
        (each for each in _LAYOUTS if each.folder in folders),
        max(_LAYOUTS, key=lambda each: len({*each.train, each.test} & rows.keys())),
    )
    if labels == "coarse" and layout.name != "cifar100":
        raise UserError(f"{tree.path}: this is CIFAR-10, which has no superclasses; leave out --superclasses")
    meta = layout.classes.format(labels)
    missing = [name for name in (*layout.train, layout.test, meta) if name not in rows]
    if missing:
        raise UserError(
            f"{tree.path}: {missing[0]} is missing, which should lie beside "
            f"{next(iter({*layout.train, layout.test} & rows.keys()), layout.train[0])}; fetch the archive again"
        )
    classes = _classes(tree, rows[meta], layout, labels)
    parts: dict[SplitName, tuple[str, ...]] = {"train": layout.train, "val": (layout.test,)}
    splits: dict[SplitName, ImageSet] = {}
    for split, files in parts.items():
        pieces = [_read(tree, rows[file], layout, labels) for file in files]
        pixels = np.concatenate([pixels for pixels, _ in pieces])
        numbers = np.concatenate([numbers for _, numbers in pieces])
        if not len(numbers) or numbers.min() < 0 or numbers.max() >= len(classes):
            raise UserError(f"{tree.path}: {files[0]}: a label is not one of the {len(classes)} classes of {meta}")
        pixels = pixels.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)
        origin = "train" if split == "train" else "test"
        splits[split] = ArrayImages(origin=origin, pixels=np.ascontiguousarray(pixels), labels=numbers)
    return Source(
        spec=str(tree.path.resolve()),
        classes=classes,
        splits=splits,
        notes=(f"{tree.path}: recognised as CIFAR-{layout.name[5:]}; its test part becomes val",),
        empty_classes="report",  # the classes are a list, which a part of the set need not fill
    )


def _classes(tree: Tree, row: int, layout: _Layout, labels: CifarLabels) -> tuple[str, ...]:
    data, name = tree.read(row), f"{tree.path}: {tree.names[row]}"
    if layout.classes.endswith(".txt"):
        names = [line.strip() for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
    else:
        key = "label_names" if layout.name == "cifar10" else f"{labels}_label_names"
        listed = read_plain_pickle(data, name=name).get(key)
        names = [_text(each) for each in listed] if isinstance(listed, list) else []
    if not names or len(set(names)) != len(names) or not all(each.isprintable() and each for each in names):
        raise UserError(f"{name}: there is no list of classes in it; fetch it again")
    return tuple(names)


def _read(tree: Tree, row: int, layout: _Layout, labels: CifarLabels) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pixels [n, 3072] and labels [n] of one file."""
    data, name = tree.read(row), f"{tree.path}: {tree.names[row]}"
    if layout.test.endswith(".bin"):
        num_labels = 1 if layout.name == "cifar10" else 2  # CIFAR-100: coarse, fine
        if len(data) % (num_labels + _PIXEL_BYTES):
            raise UserError(f"{name}: {len(data):,} bytes are no whole number of images; fetch it again")
        table = np.frombuffer(data, dtype=np.uint8).reshape(-1, num_labels + _PIXEL_BYTES)
        column = 0 if labels == "coarse" else num_labels - 1
        return table[:, num_labels:], table[:, column].astype(np.int64)
    content = read_plain_pickle(data, name=name)
    pixels, numbers = content.get("data"), content.get("labels" if layout.name == "cifar10" else f"{labels}_labels")
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.shape[1:] != (_PIXEL_BYTES,)
        or not isinstance(numbers, list)
        or len(numbers) != len(pixels)
        or not all(type(number) is int and 0 <= number < 1000 for number in numbers)
    ):
        raise UserError(f"{name}: it has no images of 32x32 with a label each; fetch it again")
    return pixels, np.array(numbers, dtype=np.int64)


def _text(name: Any) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


def is_cifar(names: set[str]) -> bool:
    """Whether files of these names (without folders) are one of the versions."""
    return any({layout.train[0], layout.test, layout.classes.format("fine")} <= names for layout in _LAYOUTS)


def in_folder(root: Path) -> Path | None:
    """The archive or the folder of a version, directly in `root`."""
    found = [root / name for name in (*FOLDERS, *ARCHIVES) if (root / name).exists()]
    if len(found) > 1 and len({path.name.split("-")[1] for path in found}) > 1:
        raise UserError(f"{root}: it holds CIFAR-10 and CIFAR-100; give one of them, such as {found[0]}")
    return found[0] if found else None

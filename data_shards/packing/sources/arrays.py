"""Read sources into memory: scikit-learn's digits, MNIST's format (four IDX files, plain or gzipped), and CIFAR.

- Digits: 1,797 grey images of 8x8 in scikit-learn's wheel (test part of UCI's "Optical Recognition of Handwritten
  Digits", Alpaydin and Kaynak, 1998).
- Fashion-MNIST: MNIST's files, with its own class names if the folder has its name. Other IDX sets are refused.
- CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): Python or binary version, packed or unpacked. Both give torchvision's
  images, labels and order; the test part becomes val. The Python version is pickles: only published files, known by
  torchvision's MD5, are opened. Takes 180 MB.
"""

import gzip
import hashlib
import importlib.util
import pickle
import warnings
import zlib
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.archive import read_small, rows_by_name
from shardvit.data_shards.packing.sources.base import (
    ImageSet,
    Int64s,
    Source,
    SplitName,
    array_images,
    published_source,
)
from shardvit.data_shards.packing.sources.located import LocatedFiles

_DIGITS_FILE = "datasets/data/digits.csv.gz"  # read by load_digits: 64 pixels and the digit a line
_DIGITS_MOST = 16  # each pixel counts the set points in a 4x4 block of the scan

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # of Debian's dataset-fashion-mnist
DIGIT_CLASSES = tuple("0123456789")
FASHION_CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat")  # README of zalandoresearch/fashion-mnist
FASHION_CLASSES += ("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_STEMS: dict[SplitName, str] = {"train": "train", "val": "t10k"}
_KINDS = {"images": "idx3-ubyte", "labels": "idx1-ubyte"}
# Both spellings occur: MNIST's own server used "-", several unpackers write ".".
IDX_NAMES = frozenset(
    f"{s}-{kind}{mark}{kinds}" for s in _STEMS.values() for kind, kinds in _KINDS.items() for mark in "-."
)


def digits_source() -> Source:
    """Read the digits as split train, 0..16 scaled to 0..255; UserError without scikit-learn."""
    found = importlib.util.find_spec("sklearn")  # importing takes a second, half of a packing
    file = Path(found.origin or "").parent / _DIGITS_FILE if found else None
    if file is None or not file.is_file():
        raise UserError("digits: this source needs scikit-learn; install it with `pip install scikit-learn`")
    data = np.loadtxt(file, delimiter=",", dtype=np.int64)
    pixels = np.rint(data[:, :-1].reshape(-1, 8, 8) * (255 / _DIGITS_MOST)).astype(np.uint8)
    return Source("digits", DIGIT_CLASSES, {"train": array_images("digits", pixels, data[:, -1])})


def fashion_mnist_source() -> Source:
    """Read Fashion-MNIST where Debian installs it; UserError says how to install it."""
    if not DEBIAN_FOLDER.is_dir():
        raise UserError(
            f"fashion-mnist: {DEBIAN_FOLDER} is not there; install it with "
            f"`apt-get install dataset-fashion-mnist`, or give the folder that holds its four IDX files"
        )
    return idx_source(DEBIAN_FOLDER)


def idx_source(root: Path) -> Source:
    """Read the four files in `root`; t10k becomes val. UserError if one is missing or broken."""
    folder = root.resolve()
    name = folder.parent.name if folder.name == "raw" else folder.name  # torchvision unpacks into FashionMNIST/raw
    classes = FASHION_CLASSES if "fashion" in name.lower() else DIGIT_CLASSES
    splits: dict[SplitName, ImageSet] = {split: _read_split(root, stem, len(classes)) for split, stem in _STEMS.items()}
    return Source(spec=str(folder), classes=classes, splits=splits)


def _read_split(root: Path, stem: str, num_classes: int) -> ImageSet:
    image_path, label_path = _find(root, stem, "images"), _find(root, stem, "labels")
    pixels, labels = _read_idx(image_path, num_dims=3), _read_idx(label_path, num_dims=1)
    if 0 in pixels.shape:
        raise UserError(f"{image_path}: there is no image in it (shape {pixels.shape})")
    if len(pixels) != len(labels):
        raise UserError(f"{label_path}: {len(labels)} labels for the {len(pixels)} images of {image_path.name}")
    if labels.max() >= num_classes:
        raise UserError(f"{label_path}: the label {labels.max()} is not one of the {num_classes} classes 0..9")
    return array_images(f"{stem}-images", pixels, labels.astype(np.int64))


def _find(root: Path, stem: str, kind: str) -> Path:
    for mark in "-.":
        for suffix in ("", ".gz"):
            path = root / f"{stem}-{kind}{mark}{_KINDS[kind]}{suffix}"
            if path.is_file():
                return path
    raise UserError(f"{root}: {stem}-{kind}-{_KINDS[kind]} (or .gz) is missing; all four files are needed")


def _read_idx(path: Path, *, num_dims: int) -> NDArray[np.uint8]:
    """IDX: bytes 0, 0, type (8: uint8), number of dims; each dim as big-endian uint32; data."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: the file cannot be read ({error}); fetch it again") from None
    magic = bytes((0, 0, 8, num_dims))
    start = 4 + 4 * num_dims
    if data[:4] != magic:
        raise UserError(f"{path}: it starts with {data[:4].hex(' ')}, an IDX file of this kind with {magic.hex(' ')}")
    if len(data) < start:
        raise UserError(f"{path}: the file ends within its header; fetch it again")
    shape = [int(n) for n in np.frombuffer(data, dtype=">u4", count=num_dims, offset=4)]
    expected = start + int(np.prod(shape, dtype=object))
    if len(data) != expected:
        raise UserError(f"{path}: {len(data)} bytes where its header says {expected}; fetch it again")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


# ---- CIFAR

CifarLabels = Literal["fine", "coarse"]
_SIDE = 32
_PIXEL_BYTES = 3 * _SIDE**2  # a row of a batch: one colour plane after the other


class _Layout(NamedTuple):
    num_classes: int
    folder: str  # in its archive
    train: tuple[str, ...]
    test: str
    classes: str  # the file with the names


_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
_BINARY = tuple(f"{batch}.bin" for batch in _BATCHES)
_LAYOUTS = (
    _Layout(10, "cifar-10-batches-py", _BATCHES, "test_batch", "batches.meta"),
    _Layout(10, "cifar-10-batches-bin", _BINARY, "test_batch.bin", "batches.meta.txt"),
    _Layout(100, "cifar-100-python", ("train",), "test", "meta"),
    _Layout(100, "cifar-100-binary", ("train.bin",), "test.bin", "{}_label_names.txt"),
)
CIFAR_FOLDERS = tuple(layout.folder for layout in _LAYOUTS)
_CIFAR_ARCHIVES = tuple(f"cifar-{n}-{version}.tar.gz" for n in (10, 100) for version in ("python", "binary"))


def find_cifar(folder: Path) -> Path | None:
    """Find a version: the folder itself, or an archive or folder in it; UserError if it holds both sets."""
    files = {path.name for path in folder.iterdir() if path.is_file()}  # folders train, test and meta are not CIFAR-100
    parts = [{layout.train[0], layout.test, layout.classes.format("fine")} for layout in _LAYOUTS]
    if folder.name in CIFAR_FOLDERS or any(part <= files for part in parts):
        return folder
    found = [folder / name for name in (*CIFAR_FOLDERS, *_CIFAR_ARCHIVES) if (folder / name).exists()]
    if len({path.name.split("-")[1] for path in found}) > 1:
        raise UserError(f"{folder}: it holds CIFAR-10 and CIFAR-100; give one of them, such as {found[0]}")
    return found[0] if found else None


def cifar_source(files: LocatedFiles, *, labels: CifarLabels = "fine") -> Source:
    """Read the set; UserError if a part is missing or not as published."""
    rows = rows_by_name(files)
    folders = {path.rpartition("/")[0].rpartition("/")[2] for path in files.names}
    layout = next(
        (each for each in _LAYOUTS if each.folder in folders),
        max(_LAYOUTS, key=lambda each: len({*each.train, each.test} & rows.keys())),
    )
    if labels == "coarse" and layout.num_classes != 100:
        raise UserError(f"{files.path}: this is CIFAR-10, which has no superclasses; leave out --superclasses")
    parts = (*layout.train, layout.test)
    if missing := [name for name in (*parts, layout.classes.format(labels)) if name not in rows]:
        beside = next((name for name in parts if name in rows), layout.train[0])
        raise UserError(f"{files.path}: {missing[0]} is missing beside {beside}; fetch the archive again")
    version = _Version(files, rows, layout, labels)
    classes = version.classes()
    splits: dict[SplitName, ImageSet] = {
        "train": version.images("train", layout.train, num_classes=len(classes)),
        "val": version.images("test", (layout.test,), num_classes=len(classes)),
    }
    title = f"CIFAR-{layout.num_classes}; its test part becomes val"
    return published_source(Path(files.path), classes, splits, title=title)


class _Version(NamedTuple):
    files: LocatedFiles
    rows: dict[str, int]
    layout: _Layout
    labels: CifarLabels

    def classes(self) -> tuple[str, ...]:
        file = self.layout.classes.format(self.labels)
        if file.endswith(".txt"):
            names = self.read(file).decode("utf-8", "replace").split()
        else:
            names = self.unpickled(file)[
                "label_names" if self.layout.num_classes == 10 else f"{self.labels}_label_names"
            ]
        if not names or len(set(names)) != len(names) or not all(map(str.isprintable, names)):
            raise UserError(f"{self.files.path}: {file}: there is no list of classes in it; fetch it again")
        return tuple(names)

    def images(self, origin: str, names: tuple[str, ...], *, num_classes: int) -> ImageSet:
        parts = [self.part(name) for name in names]
        pixels = np.concatenate([pixels for pixels, _ in parts]).reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)
        numbers = np.concatenate([numbers for _, numbers in parts])
        if not len(numbers) or numbers.max() >= num_classes:
            raise UserError(f"{self.files.path}: {names[0]}: a label is not one of its {num_classes} classes")
        return array_images(origin, np.ascontiguousarray(pixels), numbers)

    def part(self, name: str) -> tuple[NDArray[np.uint8], Int64s]:
        if not name.endswith(".bin"):
            batch = self.unpickled(name)
            numbers = batch["labels" if self.layout.num_classes == 10 else f"{self.labels}_labels"]
            return batch["data"], np.array(numbers, dtype=np.int64)
        data = self.read(name)
        num_labels = 1 if self.layout.num_classes == 10 else 2  # CIFAR-100: coarse, fine
        if len(data) % (num_labels + _PIXEL_BYTES):
            raise UserError(
                f"{self.files.path}: {name}: not a whole number of images in {len(data):,} bytes; fetch it again"
            )
        table = np.frombuffer(data, dtype=np.uint8).reshape(-1, num_labels + _PIXEL_BYTES)
        return table[:, num_labels:], table[:, 0 if self.labels == "coarse" else num_labels - 1].astype(np.int64)

    def read(self, name: str) -> bytes:
        return read_small(self.files, self.rows[name])

    def unpickled(self, name: str) -> dict[str, Any]:
        data = self.read(name)
        if hashlib.md5(data, usedforsecurity=False).hexdigest() not in _published_md5():
            raise UserError(
                f"{self.files.path}: {name} is not the published file, so this pickle is not opened: fetch it again, "
                "or give the binary version"
            )
        with warnings.catch_warnings(action="ignore"):  # numpy's, about its old names
            return pickle.loads(data, encoding="latin1")


def _published_md5() -> set[str]:
    from torchvision.datasets import CIFAR10, CIFAR100

    lists = [md5 for each in (CIFAR10, CIFAR100) for _, md5 in (*each.train_list, *each.test_list)]
    return {*lists, CIFAR10.meta["md5"], CIFAR100.meta["md5"]}

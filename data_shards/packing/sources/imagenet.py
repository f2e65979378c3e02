"""ImageNet as published, and any set in its form: class folders or class tars in a folder or archive, and flat val.

- ImageNet-1k: ILSVRC2012_img_train.tar (1,000 tars n01440764.tar, ...) or the folder train/ of class tars or folders;
  ILSVRC2012_img_val.tar (50,000 images without folders) or val/, and a file with their classes (see `val_labels`).
- ImageNet-21k: fall11_whole.tar (21,841 class tars, 14,197,122 images: the paper's) or winter21_whole.tar.gz (19,167).
- Kaggle's archive ILSVRC/Data/CLS-LOC, and any .tar or .tar.gz of class folders, with or without train/ and val/.

Classes are the folders' names in code-point order, as everywhere: ImageNet's class 0 is n01440764. Listing 1.28 million
images takes one small read each, once; nothing is unpacked.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from data_shards.errors import UserError
from data_shards.packing.sources import val_labels
from data_shards.packing.sources.archive import Archive, Unpacking, list_archives
from data_shards.packing.sources.base import ImageSet, Source, SplitName, is_image, left_out_notes
from data_shards.packing.sources.tree import ArchiveTree, Tree, is_archive, open_tree
from data_shards.text import counted, named

TRAIN_ARCHIVES = ("ILSVRC2012_img_train.tar", "fall11_whole.tar", "winter21_whole.tar.gz", "winter21_whole.tar")
VAL_ARCHIVE = "ILSVRC2012_img_val.tar"
_KAGGLE = "ILSVRC/Data/CLS-LOC"
_SPLITS: dict[str, SplitName] = {"train": "train", "val": "val", "validation": "val", "test": "test"}
_WORDNET_ID = re.compile(r"n\d{8}")
_WORDNET_TAR = re.compile(r"n\d{8}\.tar")


class _Release(NamedTuple):
    title: str
    num_classes: int
    num_images: int


_RELEASES = (  # image-net.org's own figures; the first two are the paper's
    _Release("ImageNet-1k (ILSVRC 2012)", 1_000, 1_281_167),
    _Release("ImageNet-21k (fall 2011)", 21_841, 14_197_122),
    _Release("ImageNet-21k (winter 2021)", 19_167, 13_153_500),
)


@dataclass(frozen=True)
class Parts:
    """Where the parts of a set are."""

    train: Path
    val: Path | None = None
    val_labels: Path | None = None


def find_parts(root: Path, *, labelled: bool = False) -> Parts | None:
    """Find the parts in a folder under their published names; None if it holds none of them.

    Flat images in val are ImageNet's if a file with their classes is there or given (`labelled`), or if the class
    folders of train are named as synsets are.
    """
    base = root / _KAGGLE if (root / _KAGGLE).is_dir() else root
    train = next((base / name for name in TRAIN_ARCHIVES if (base / name).is_file()), None)
    if train is None and holds_class_tars(base / "train"):
        train = base / "train"
    if train is None and holds_class_tars(base):
        return Parts(base)
    val = next((path for path in (base / VAL_ARCHIVE, base / "val") if path.exists()), None)
    labels = next(
        (place / name for place in (base, root) for name in val_labels.NAMES if (place / name).exists()), None
    )
    if train is None and val is not None and (base / "train").is_dir() and (val.is_file() or _holds(val, is_image)):
        is_imagenet = labelled or labels is not None or _holds(base / "train", _WORDNET_ID.fullmatch)
        train = base / "train" if is_imagenet else None
    if train is None:
        if (base / VAL_ARCHIVE).is_file():
            raise UserError(f"{base}: {VAL_ARCHIVE} is there without {TRAIN_ARCHIVES[0]}, which has to lie beside it")
        return None
    return Parts(train, val, None if val is None else labels)


def class_source(
    parts: Parts, *, spec: Path, unpacking: Unpacking, unfit: Literal["refuse", "skip"] = "refuse"
) -> Source:
    """Raises UserError for a missing part, images without a class, and classes of val that train does not have."""
    found = _by_class(_open(parts.train, unpacking), unfit=unfit)
    notes = [*found.notes]
    if "train" not in found.splits:
        raise UserError(f"{parts.train}: it holds {', '.join(found.splits)} without train; give the training part")
    classes = tuple(sorted(found.splits["train"]))
    if parts.val is None and parts.val_labels is not None:
        raise UserError(f"{parts.val_labels}: there are no held-out images whose classes it could name; give --val too")
    if parts.val is not None and "val" in found.splits:
        raise UserError(f"{parts.train}: it has a held-out part of its own; leave out --val")
    splits: dict[SplitName, ImageSet] = {split: found.images(split, classes) for split in found.splits}
    if parts.val is not None:
        splits = {"train": splits["train"], "val": _val(parts, classes, unpacking=unpacking)}
    elif list(splits) == ["train", "test"]:
        splits = {"train": splits["train"], "val": splits["test"]}
    what = f"images of {len(classes):,} classes, in {parts.train.name}"
    for release in _RELEASES if all(map(_WORDNET_ID.fullmatch, classes)) else ():
        if release.num_classes == len(classes):
            what = f"{release.title}: {(count := len(splits['train'])):,} training images"
            if count != release.num_images:
                what += f" ({release.num_images:,} are published: images are missing)"
    notes.append(f"{spec}: recognised as {what}")
    return Source(
        spec=str(spec.resolve()),
        classes=classes,
        splits=splits,
        notes=tuple(notes),
        left_out=found.left_out,
        empty_classes="refuse" if len(splits) > 1 and unfit == "refuse" else "report",
    )


def holds_class_tars(folder: Path) -> bool:
    """True for tars named as WordNet's synsets: others may be shards."""
    try:
        return _holds(folder, _WORDNET_TAR.fullmatch)
    except OSError:
        return False


def _holds(folder: Path, is_one: Callable[[str], object]) -> bool:
    with os.scandir(folder) as entries:
        return any(is_one(entry.name) for entry in entries)


def _open(path: Path, unpacking: Unpacking) -> Tree:
    if path.is_dir() and holds_class_tars(path):
        with os.scandir(path) as entries:
            here = {entry.name: entry.path for entry in entries}
        if any(map(_WORDNET_ID.fullmatch, here)):
            raise UserError(
                f"{path}: class tars and class folders lie side by side, as when unpacking was stopped; keep one kind"
            )
        tars = [here[name] for name in sorted(here) if _WORDNET_TAR.fullmatch(name)]
        return ArchiveTree(path, list_archives([Archive(Path(tar), unpacking) for tar in tars], inside="stems"))
    return open_tree(path, unpacking=unpacking)


@dataclass(frozen=True)
class _Found:
    tree: Tree
    splits: dict[SplitName, dict[str, list[int]]]  # class -> rows, sorted by name
    notes: tuple[str, ...]
    left_out: tuple[tuple[SplitName, str], ...]

    def images(self, split: SplitName, classes: tuple[str, ...]) -> ImageSet:
        by_class = self.splits[split]
        strangers = sorted(by_class.keys() - set(classes))
        if strangers:
            raise UserError(f"{self.tree.path}: {split} has classes that train has not: {named(strangers)}")
        rows = [np.array(by_class.get(name, []), dtype=np.int64) for name in classes]
        counts = [len(each) for each in rows]
        return self.tree.images(np.concatenate(rows), np.repeat(np.arange(len(classes)), counts).astype(np.int64))


def _by_class(tree: Tree, *, unfit: Literal["refuse", "skip"]) -> _Found:
    """Images of [SPLIT/]CLASS/**, below the folders that all of them share."""
    by_folder: dict[str, list[int]] = defaultdict(list)
    others: list[str] = []
    for row, path in enumerate(tree.names):
        if is_image(path):
            by_folder[path.rpartition("/")[0]].append(row)
        else:
            others.append(path)
    notes = left_out_notes(tree.path, others)
    if not by_folder:
        raise UserError(
            f"{tree.path}: there is no image in it; give an archive or folder of class folders or class tars"
            + "".join(f" ({note})" for note in notes)
        )
    loose = by_folder.pop("", [])
    shared = _shared([folder.split("/") for folder in by_folder])
    if not by_folder:
        what = "as shards have it, which need no packing" if len(others) >= len(loose) else "without class folders"
        raise UserError(
            f"{tree.path}: its images lie side by side, {what}; the training part should hold class folders or class "
            f"tars{_val_hint(tree.path)}"
        )
    if len(by_folder) == 1 and is_archive(tree.path):
        raise UserError(
            f"{tree.path}: all its images lie in one folder ({next(iter(by_folder))}), so they would be one class; "
            f"give an archive of class folders or class tars{_val_hint(tree.path)}"
        )
    tops = {parts[shared] for folder in by_folder if len(parts := folder.split("/")) > shared}
    has_splits = bool(tops) and tops <= _SPLITS.keys()
    splits: dict[SplitName, dict[str, list[int]]] = {}
    for folder, rows in by_folder.items():
        parts = folder.split("/")[shared:]
        split: SplitName = _SPLITS[parts.pop(0)] if has_splits and parts else "train"
        if parts:
            splits.setdefault(split, {}).setdefault(parts[0], []).extend(rows)
        else:
            loose += rows
    if loose and unfit == "refuse":
        raise UserError(
            f"{tree.path}: {tree.names[loose[0]]} lies beside the class folders"
            f"{f' (and {len(loose) - 1:,} more images)' if len(loose) > 1 else ''}; leave them out with "
            "--skip-unreadable, or give another archive"
        )
    replaced: list[str] = []
    for by_class in splits.values():
        unfit_names = [name for name in by_class if not name.isprintable()]
        if unfit_names:
            raise UserError(f"{tree.path}: the class folder {unfit_names[0]!a} has a name that cannot be written")
        for rows in by_class.values():
            rows.sort(key=tree.names.__getitem__)
            # A tar may hold a file twice: when it is unpacked, the later one stays.
            latest = {tree.names[row]: row for row in rows}
            replaced += [tree.names[row] for row in rows if latest[tree.names[row]] != row]
            rows[:] = latest.values()
    if replaced:
        which = f"{counted(len(replaced), 'file')} replaced by a later one of the same name (the first: {replaced[0]})"
        notes.append(f"{tree.path}: {which}, as when it is unpacked")
    order: tuple[SplitName, ...] = ("train", "val", "test")
    splits = {split: splits[split] for split in order if split in splits}
    return _Found(tree, splits, tuple(notes), tuple(("train", tree.names[row]) for row in loose))


def _shared(folders: Sequence[list[str]]) -> int:
    """Count the leading folders that all images share; one folder alone is a class."""
    if len(folders) == 1:
        return len(folders[0]) - 1
    return len([*takewhile(lambda column: len({*column}) == 1, zip(*folders, strict=False))])


def _val(parts: Parts, classes: tuple[str, ...], *, unpacking: Unpacking) -> ImageSet:
    assert parts.val is not None
    tree = _open(parts.val, unpacking)
    rows = [row for row, path in enumerate(tree.names) if is_image(path)]
    if not rows:
        raise UserError(f"{parts.val}: there is no image in it")
    names_file = parts.val_labels
    if names_file is None:
        folders = {tree.names[row].rpartition("/")[0].rpartition("/")[2] for row in rows}
        if folders <= set(classes):
            found = _by_class(tree, unfit="refuse")
            return found.images(next(iter(found.splits)), classes)
        beside = [parts.val.parent / name for name in val_labels.NAMES]
        names_file = next((path for path in beside if path.exists()), None)
    if names_file is None:
        raise UserError(
            f"{parts.val}: its images have no class folders, so a file must name their classes: "
            f"{' or '.join(val_labels.NAMES[:2])} has to lie beside it, or give it with --val-labels"
        )
    rows.sort(key=lambda row: tree.names[row].rpartition("/")[2])
    names = [tree.names[row] for row in rows]
    numbers = {name: number for number, name in enumerate(classes)}
    labels = val_labels.read_val_labels(names_file, names, unpacking=unpacking)
    strangers = sorted({*labels} - numbers.keys())
    if strangers:
        raise UserError(
            f"{names_file}: {named(strangers)} {'is no class' if len(strangers) == 1 else 'are no classes'} of "
            f"{parts.train}; give the labels and the training images of one set"
        )
    return tree.images(np.array(rows, dtype=np.int64), np.array([numbers[label] for label in labels], dtype=np.int64))


def _val_hint(path: Path) -> str:
    return f"; {path.name} is the held-out part: give it with --val" if path.name == VAL_ARCHIVE else ""

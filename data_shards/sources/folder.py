"""Folders of class folders: ROOT/CLASS/**/*.jpg, or ROOT/train/CLASS/** with ROOT/val (or validation, or
test).

Classes are the folders' names in code-point order, as torchvision's ImageFolder has them, so labels agree.
Hidden files and folders are passed over; other files that are not images are passed over, counted and named.
Listing costs one `scandir` per folder; no image is opened here. Symbolic links are followed, once per folder.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_shards.errors import UserError
from data_shards.sources.base import ImageSet, Source, SplitName
from data_shards.sources.files import FileImages
from data_shards.tars.tar_index import IMAGE_EXTENSIONS

# In this order: what is called val is preferred to what is called test, whose labels are often not public.
VAL_NAMES = ("val", "validation", "test")


@dataclass(frozen=True)
class _Listing:
    images: list[str]
    others: list[str]


def folder_source(root: Path) -> Source:
    """Recognise the layout below `root`.

    Raises UserError for mixed layouts, a class folder without images, no class folder at all, val without
    train, and different classes in train and val.
    """
    folders, images, _ = _scan(root)
    named = [name for name in ("train", *VAL_NAMES) if name in folders and _scan(root / name)[0]]
    if images:
        raise UserError(
            f"{root}: {images[0]} lies beside the class folders; put each image into the folder of its class"
        )
    if not folders:
        raise UserError(f"{root}: there are no class folders in it; expected is ROOT/CLASS/*.jpg")
    notes: list[str] = []
    splits: dict[SplitName, ImageSet] = {}
    if len(folders) == 1 and not named and "train" in _scan(root / folders[0])[0]:
        raise UserError(f"{root}: its only folder holds train/ as a data set does; did you mean {root / folders[0]}?")
    if not named:
        if set(folders) <= {"train", *VAL_NAMES}:
            raise UserError(
                f"{root / folders[0]}: images lie in it without class folders; expected is ROOT/train/CLASS/*.jpg"
            )
        classes, splits["train"] = _read_split(root, "", notes)
    else:
        used = _choose_splits(root, folders, named, notes)
        classes, splits["train"] = _read_split(root, "train", notes)
        if used is not None:
            val_classes, splits["val"] = _read_split(root, used, notes)
            _demand_same_classes(root, used, classes, val_classes)
    resolved = root.resolve()
    return Source(spec=str(resolved), name=resolved.name, classes=classes, splits=splits, notes=tuple(notes))


def _choose_splits(root: Path, folders: list[str], named: list[str], notes: list[str]) -> str | None:
    """Of a layout with splits: which folder is val, if any."""
    strangers = [name for name in folders if name not in ("train", *VAL_NAMES)]
    if strangers:
        raise UserError(
            f"{root}: mixed layouts: {named[0]} holds class folders, as a split does, but {strangers[0]} "
            f"lies beside it; keep only train and val there, or only class folders"
        )
    if "train" not in named:
        raise UserError(f"{root}: {named[0]} is there without train; expected is ROOT/train/CLASS/*.jpg")
    flat = [name for name in folders if name not in named]
    if flat:
        raise UserError(
            f"{root / flat[0]}: there are no class folders in it as there are in train; "
            f"sort its images into class folders or move it away"
        )
    candidates = [name for name in VAL_NAMES if name in named]
    for name in candidates[1:]:
        notes.append(f"{root / name} was left out, {candidates[0]} serves as the held-out split")
    return candidates[0] if candidates else None


def _read_split(root: Path, split: str, notes: list[str]) -> tuple[tuple[str, ...], FileImages]:
    """All images of ROOT[/SPLIT]/CLASS; paths stay relative to ROOT so that they say which split they are
    from.
    """
    base = root / split
    folders, images, others = _scan(base)
    if images:
        raise UserError(
            f"{base}: {images[0]} lies beside the class folders; put each image into the folder of its class"
        )
    files: list[str] = []
    labels: list[int] = []
    skipped = [f"{split}/{name}" if split else name for name in others]
    for label, name in enumerate(folders):
        if not name.isprintable():
            raise UserError(f"{base}: the class folder {name!a} has a name that cannot be written; rename it")
        listing = _walk(root, f"{split}/{name}" if split else name)
        if not listing.images:
            raise UserError(f"{base / name}: there is no image in this class folder; add some or remove the folder")
        files += listing.images
        labels += [label] * len(listing.images)
        skipped += listing.others
    if skipped:
        notes.append(f"{base}: {len(skipped)} files are not images and were left out (the first: {skipped[0]})")
    return tuple(folders), FileImages(root=root, files=files, labels=np.array(labels, dtype=np.int64))


def walk_images(root: Path) -> list[str]:
    """Paths of all image files below `root`, relative to it; hidden ones are passed over."""
    return _walk(root, "").images


def _walk(root: Path, start: str) -> _Listing:
    """All files below ROOT/start, depth first, each folder in code-point order."""
    listing = _Listing([], [])
    seen: set[str] = set()
    stack = [start]
    while stack:
        folder = stack.pop()
        real = os.path.realpath(root / folder)
        if real in seen:  # a symbolic link back to where we were
            continue
        seen.add(real)
        folders, images, others = _scan(root / folder)
        above = f"{folder}/" if folder else ""
        listing.images.extend(f"{above}{name}" for name in images)
        listing.others.extend(f"{above}{name}" for name in others)
        stack.extend(f"{above}{name}" for name in reversed(folders))
    return listing


def _scan(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """The names of sub-folders, images and other files directly in `folder`, sorted, without hidden ones."""
    folders: list[str] = []
    images: list[str] = []
    others: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    folders.append(entry.name)
                elif entry.name.rpartition(".")[2].lower() in IMAGE_EXTENSIONS:
                    images.append(entry.name)
                else:
                    others.append(entry.name)
    except OSError as error:
        raise UserError(f"{folder}: the folder cannot be listed ({error.strerror})") from None
    return sorted(folders), sorted(images), sorted(others)


def _demand_same_classes(root: Path, val: str, train_classes: tuple[str, ...], val_classes: tuple[str, ...]) -> None:
    for here, there, missing in (
        ("train", val, sorted(set(train_classes) - set(val_classes))),
        (val, "train", sorted(set(val_classes) - set(train_classes))),
    ):
        if missing:
            raise UserError(
                f"{root}: {len(missing)} class folders of {here} are missing in {there} "
                f"(the first: {missing[0]}); both must have the same classes"
            )

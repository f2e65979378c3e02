"""Folders of class folders: ROOT/CLASS/**/*.jpg, or ROOT/train/CLASS/** with ROOT/val (validation, test).

Classes are the folders' names in code-point order, as in torchvision's ImageFolder, so labels agree. Hidden files and
folders are skipped; other files that are not images are skipped, counted and named. Listing costs one `scandir` per
folder; no image is opened. Symbolic links are followed, once per folder.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from data_shards.errors import UserError
from data_shards.packing.sources.base import (
    FileImages,
    ImageSet,
    Source,
    SplitName,
    is_image,
    left_out_notes,
    refuse_all,
)
from data_shards.text import named
from data_shards.vocabulary import SPLIT_FOLDERS

VAL_NAMES = SPLIT_FOLDERS[1:]


@dataclass
class _Found:
    """Notes taken while listing: mistakes, and what is left out."""

    unfit: Literal["refuse", "skip"]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: list[tuple[SplitName, str]] = field(default_factory=list)

    def loose(self, base: Path, paths: list[str], *, split: SplitName) -> None:
        """Images beside class folders, which have no label; `paths` are relative to the source."""
        if not paths:
            return
        which = named([path.rpartition("/")[2] for path in paths])
        verb = "lies" if len(paths) == 1 else "lie"
        if self.unfit == "skip":
            self.left_out.extend((split, path) for path in paths)
            self.notes.append(f"{base}: {which} {verb} beside the class folders and was left out, having no label")
        else:
            self.problems.append(
                f"{base}: {which} {verb} beside the class folders; put each image into the folder of its class, or "
                "leave them out with --skip-unreadable"
            )

    def empty(self, folder: Path) -> None:
        if self.unfit == "skip":
            self.notes.append(f"{folder}: there is no image in this class folder, which was passed over")
        else:
            self.problems.append(
                f"{folder}: there is no image in this class folder; add some, remove the folder, or pass over it with "
                "--skip-unreadable"
            )


def folder_source(root: Path, *, unfit: Literal["refuse", "skip"] = "refuse") -> Source:
    """Recognise the layout below `root`.

    Raises UserError, with all mistakes at once, for mixed layouts, a class folder without images or images beside class
    folders (unless `unfit` is skip), no class folder at all, val without train, and different classes in train and val.
    """
    folders, images, _ = _scan(root)
    with_classes = [name for name in ("train", *VAL_NAMES) if name in folders and _scan(root / name)[0]]
    found = _Found(unfit)
    if with_classes or not folders:  # else it is split train itself
        found.loose(root, images, split="train")
    if not folders:
        if not found.problems:
            found.problems.append(f"{root}: there are no class folders in it; expected is ROOT/CLASS/*.jpg")
        refuse_all(found.problems)
    if len(folders) == 1 and not with_classes and "train" in _scan(root / folders[0])[0]:
        raise UserError(f"{root}: its only folder holds train/ as a data set does; did you mean {root / folders[0]}?")
    used: dict[SplitName, str] = {"train": ""}
    if with_classes:
        used = _choose_splits(root, folders, with_classes, found)
    elif set(folders) <= {"train", *VAL_NAMES}:
        found.problems.append(
            f"{root / folders[0]}: images lie in it without class folders; expected is ROOT/train/CLASS/*.jpg"
        )
        refuse_all(found.problems)
    by_class: dict[SplitName, dict[str, list[str]]] = {
        split: _read_split(root, folder, split=split, found=found) for split, folder in used.items()
    }
    # An empty folder is not a class in train; elsewhere it is a class of train without images.
    classes = tuple(name for name, images in by_class["train"].items() if images or unfit == "refuse")
    for split, folder in used.items():
        here = {name for name, images in by_class[split].items() if images or name in classes or unfit == "refuse"}
        found.problems += _differences(root, folder, classes, here)
    refuse_all(found.problems)
    number = {name: label for label, name in enumerate(classes)}
    splits: dict[SplitName, ImageSet] = {}
    for split, its in by_class.items():
        labels = [number[name] for name, images in its.items() for _ in images]
        files = [file for images in its.values() for file in images]
        splits[split] = FileImages(root=root, files=files, labels=np.array(labels, dtype=np.int64))
    return Source(
        spec=str(root.resolve()),
        classes=classes,
        splits=splits,
        notes=tuple(found.notes),
        left_out=tuple(found.left_out),
        empty_classes="report" if unfit == "skip" else "refuse",
    )


def _choose_splits(root: Path, folders: list[str], with_classes: list[str], found: _Found) -> dict[SplitName, str]:
    """{split: folder} for a layout with splits; train is among them."""
    strangers = [name for name in folders if name not in ("train", *VAL_NAMES)]
    if strangers:
        found.problems.append(
            f"{root}: mixed layouts: {with_classes[0]} holds class folders, as a split does, but {named(strangers)} "
            f"lies beside it; keep only train, val and test there, or only class folders"
        )
    if "train" not in with_classes:
        found.problems.append(f"{root}: {with_classes[0]} is there without train; expected is ROOT/train/CLASS/*.jpg")
        refuse_all(found.problems)
    for name in folders:
        if name not in with_classes and name not in strangers:
            found.problems.append(
                f"{root / name}: there are no class folders in it as there are in train; "
                f"sort its images into class folders or move it away"
            )
    used: dict[SplitName, str] = {"train": "train"}
    for name in VAL_NAMES:
        if name in with_classes:
            split: SplitName = "test" if name == "test" and "val" in used else "val"
            if split in used:
                found.notes.append(f"{root / name} was left out, {used[split]} serves as the held-out split")
            else:
                used[split] = name
    return used


def _read_split(root: Path, folder: str, *, split: SplitName, found: _Found) -> dict[str, list[str]]:
    """Class -> images of ROOT[/FOLDER]/CLASS; paths stay relative to ROOT, so they include the split."""
    base = root / folder
    folders, images, skipped = _scan(base)
    above = f"{folder}/" if folder else ""
    found.loose(base, [above + name for name in images], split=split)
    skipped = [above + name for name in skipped]
    by_class: dict[str, list[str]] = {}
    for name in folders:
        if not name.isprintable():
            found.problems.append(f"{base}: the class folder {name!a} has a name that cannot be written; rename it")
            continue
        by_class[name], others = _walk(root, above + name)
        if not by_class[name]:
            found.empty(base / name)
        skipped += others
    found.notes += left_out_notes(base, skipped)
    return by_class


def walk_images(root: Path) -> list[str]:
    """Paths of all image files below `root`, relative to it, without hidden ones."""
    return _walk(root, "")[0]


def image_files(paths: Sequence[Path]) -> list[Path]:
    """The files, and all images below the folders, sorted, without hidden ones.

    Raises UserError if a file does not exist or a folder has no image in it.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = walk_images(path)
            if not found:
                raise UserError(f"{path}: there is no image in this folder (jpg, png, webp, bmp, gif, tif or ppm)")
            files += [path / name for name in found]
        elif path.exists():
            files.append(path)
        else:
            raise UserError(f"{path}: there is no such image or folder")
    return files


def walk_files(root: Path, *, start: str) -> list[str]:
    """Paths of all files below ROOT/start, relative to `root`, without hidden ones."""
    images, others = _walk(root, start)
    return [*images, *others]


def _walk(root: Path, start: str) -> tuple[list[str], list[str]]:
    """Images and other files below ROOT/start, depth first, each folder in code-point order."""
    all_images: list[str] = []
    all_others: list[str] = []
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
        all_images += [f"{above}{name}" for name in images]
        all_others += [f"{above}{name}" for name in others]
        stack.extend(f"{above}{name}" for name in reversed(folders))
    return all_images, all_others


def _scan(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """The names of sub-folders, images and other files directly in `folder`, sorted, without hidden ones."""
    try:
        with os.scandir(folder) as entries:
            is_folder = {entry.name: entry.is_dir() for entry in entries if not entry.name.startswith(".")}
    except OSError as error:
        raise UserError(f"{folder}: the folder cannot be listed ({error.strerror})") from None
    files = sorted(name for name in is_folder if not is_folder[name])
    images = [name for name in files if is_image(name)]
    return sorted(name for name in is_folder if is_folder[name]), images, sorted({*files} - {*images})


def _differences(root: Path, folder: str, classes: tuple[str, ...], here: set[str]) -> list[str]:
    return [
        f"{root}: {len(missing)} class folders of {one} are missing in {other} (the first: {missing[0]}); both must "
        "have the same classes"
        for one, other, missing in (
            ("train", folder, sorted(set(classes) - here)),
            (folder, "train", sorted(here - set(classes))),
        )
        if missing
    ]

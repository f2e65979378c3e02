"""Read class folders: ROOT/CLASS/**/*.jpg, or ROOT/train/CLASS/** with ROOT/val (validation, test).

Classes are sorted in code-point order, as by torchvision's ImageFolder, so labels agree. Files that are not images are
skipped and counted. Opens no image.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.base import (
    ImageSet,
    LeftOut,
    Source,
    SplitName,
    class_images,
    left_out_notes,
    refuse_all,
    walk_folder,
)
from shardvit.data_shards.packing.sources.tree import FolderTree
from shardvit.data_shards.text import named
from shardvit.data_shards.vocabulary import SPLIT_FOLDERS


@dataclass
class _Listing:
    tree: FolderTree
    unfit: Literal["refuse", "skip"]
    names: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def skip(self, what: str, *, consequence: str, remedy: str) -> None:
        if self.unfit == "skip":
            self.notes.append(f"{what}{consequence}")
        else:
            self.problems.append(f"{what}; {remedy} with --skip-unreadable")

    def skip_loose(self, base: str, paths: list[str], *, split: SplitName) -> None:
        if paths:
            self.skip(
                f"{base}: {named([path.rpartition('/')[2] for path in paths])} {'lies' if len(paths) == 1 else 'lie'} "
                "beside the class folders",
                consequence=" and was left out, having no label",
                remedy="put each image into the folder of its class, or leave them out",
            )
            self.left_out.extend(LeftOut(path, split=split) for path in paths)

    def read_split(self, folder: str, *, split: SplitName) -> dict[str, range]:
        """Map each class to the rows of its images in ROOT[/FOLDER]/CLASS."""
        base = self.tree.at(folder)
        above = f"{folder}/" if folder else ""
        folders, images, skipped = self.tree.scan(folder)
        self.skip_loose(base, [above + name for name in images], split=split)
        skipped = [above + name for name in skipped]
        by_class: dict[str, range] = {}
        for name in folders:
            if not name.isprintable():
                self.problems.append(f"{base}: the class folder {name!a} has a name that cannot be written; rename it")
                continue
            images, others = self.tree.walk(above + name)
            if not images:
                self.skip(
                    f"{self.tree.at(above + name)}: there is no image in this class folder",
                    consequence=", which was skipped",
                    remedy="add some, remove the folder, or pass over it",
                )
            by_class[name] = range(len(self.names), len(self.names) + len(images))
            self.names += images
            skipped += others
        self.notes += left_out_notes(base, skipped)
        return by_class


def folder_source(tree: FolderTree, *, unfit: Literal["refuse", "skip"] = "refuse") -> Source:
    """Recognise the layout of a folder; one UserError lists all mistakes but those that `unfit` skips."""
    found = _Listing(tree, unfit)
    used = _splits(found)
    by_class: dict[SplitName, dict[str, range]] = {
        split: found.read_split(folder, split=split) for split, folder in used.items()
    }
    # In train an empty folder is not a class; elsewhere it is a class of train without images.
    classes = tuple(name for name, images in by_class["train"].items() if images or unfit == "refuse")
    for split, folder in used.items():
        here = {name for name, images in by_class[split].items() if images or name in classes or unfit == "refuse"}
        both = (("train", folder, {*classes} - here), (folder, "train", here - {*classes}))
        found.problems += [
            f"{tree.at('')}: {len(missing)} class folders of {one} are missing in {other} (the first: {min(missing)}); "
            "both must have the same classes"
            for one, other, missing in both
            if missing
        ]
    refuse_all(found.problems)
    files = tree.files(found.names)
    splits: dict[SplitName, ImageSet] = {}
    for split, its in by_class.items():
        splits[split] = class_images(files, its, classes)
    return Source(
        spec=tree.spec,
        classes=classes,
        splits=splits,
        notes=tuple(found.notes),
        left_out=tuple(found.left_out),
        empty_classes="report" if unfit == "skip" else "refuse",
    )


def _splits(found: _Listing) -> dict[SplitName, str]:
    """Map each split, train included, to its folder ("": the root); UserError if no layout is recognised."""
    tree, problems, root = found.tree, found.problems, found.tree.at("")
    folders, images, _ = tree.scan("")
    with_classes = [name for name in SPLIT_FOLDERS if name in folders and tree.scan(name)[0]]
    if with_classes or not folders:  # else root is train itself
        found.skip_loose(root, images, split="train")
    if not folders:
        refuse_all(problems or [f"{root}: there are no class folders in it; expected is ROOT/CLASS/*.jpg"])
    if not with_classes:
        if len(folders) == 1 and "train" in tree.scan(folders[0])[0]:
            likely = tree.at(folders[0])
            raise UserError(f"{root}: its only folder holds train/ as a data set does; did you mean {likely}?")
        if {*folders} <= {*SPLIT_FOLDERS}:
            where = f"{tree.at(folders[0])}: images lie in it without class folders"
            refuse_all([*problems, f"{where}; expected is ROOT/train/CLASS/*.jpg"])
        return {"train": ""}
    strangers = [name for name in folders if name not in SPLIT_FOLDERS]
    if strangers:
        problems.append(
            f"{root}: mixed layouts: {with_classes[0]} holds class folders, as a split does, but {named(strangers)} "
            "lies beside it; keep only train, val and test there, or only class folders"
        )
    if "train" not in with_classes:
        problems.append(f"{root}: {with_classes[0]} is there without train; expected is ROOT/train/CLASS/*.jpg")
        refuse_all(problems)
    problems += [
        f"{tree.at(name)}: there are no class folders in it as there are in train; sort its images into class folders "
        "or move it away"
        for name in folders
        if name not in with_classes and name not in strangers
    ]
    used: dict[SplitName, str] = {}
    for name in with_classes:
        split: SplitName = "train" if name == "train" else "test" if name == "test" and "val" in used else "val"
        if used.setdefault(split, name) != name:
            found.notes.append(f"{tree.at(name)} was left out, {used[split]} serves as the held-out split")
    return used


def image_files(paths: Sequence[Path]) -> list[Path]:
    """List the files, and all images below the folders; UserError for missing paths and folders without images."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = walk_folder(path)[0]
            if not found:
                raise UserError(f"{path}: there is no image in this folder (jpg, png, webp, bmp, gif, tif or ppm)")
            files += [path / name for name in found]
        elif path.exists():
            files.append(path)
        else:
            raise UserError(f"{path}: there is no such image or folder")
    return files

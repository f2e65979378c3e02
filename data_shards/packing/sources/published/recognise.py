"""Which published data set lies at a path: decided by names, in a folder or in an archive."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from data_shards.errors import UserError
from data_shards.packing.sources.archive import Unpacking
from data_shards.packing.sources.base import Source
from data_shards.packing.sources.published import cifar, imagenet, oxford, path_lists
from data_shards.packing.sources.tree import is_archive, open_tree

_PEEKED_FILES = 100


@dataclass(frozen=True)
class Published:
    """What is said of a published set beside its path."""

    val: Path | None = None  # its held-out images, where they do not lie beside the training images
    val_labels: Path | None = None  # and their classes
    cifar_labels: cifar.CifarLabels = "fine"

    @property
    def given(self) -> list[str]:
        """The flags that name them."""
        flags = {"--val": self.val, "--val-labels": self.val_labels}
        flags["--superclasses"] = None if self.cifar_labels == "fine" else Path()
        return [flag for flag, value in flags.items() if value is not None]


def published_source(
    path: Path, options: Published, *, unpacking: Unpacking, unfit: Literal["refuse", "skip"]
) -> Source | None:
    """The set at `path`, or None if the layout of a folder is none of them.

    Raises UserError for an unknown file, a set of which a part is missing, and an option that means nothing for it.
    """
    if path.is_file() and path.suffix == ".txt":
        _refuse(options, "--val-labels", "--superclasses", what=f"{path} is a list of images with their classes")
        return path_lists.path_lists_source(path, options.val, spec=path)
    if path.is_file() and not is_archive(path):
        return None
    source = _by_own_splits(path, options, unpacking=unpacking)
    if source is not None:
        return source
    labelled = options.val_labels is not None
    parts = imagenet.find_parts(path, labelled=labelled) if path.is_dir() else imagenet.Parts(path)
    if parts is None and options.val is not None:
        parts = imagenet.Parts(path)
    if parts is None:
        return None
    _refuse(options, "--superclasses", what=f"{path} is not CIFAR-100")
    if options.val is not None:
        if not options.val.exists():
            raise UserError(f"--val: {options.val} is not there; give the folder or archive of the held-out images")
        parts = replace(parts, val=options.val, val_labels=options.val_labels)
    elif options.val_labels is not None:
        parts = replace(parts, val_labels=options.val_labels)
    return imagenet.class_source(parts, spec=path, unpacking=unpacking, unfit=unfit)


def _by_own_splits(path: Path, options: Published, *, unpacking: Unpacking) -> Source | None:
    """Sets whose parts say themselves what is held out."""
    if path.is_dir():
        if (path / path_lists.TRAIN).is_file():
            _refuse(options, *options.given, what=f"{path} has its test images in {path_lists.TEST}")
            if not (path / path_lists.TEST).is_file():
                raise UserError(f"{path}: {path_lists.TEST} is missing, which has to lie beside {path_lists.TRAIN}")
            return path_lists.path_lists_source(path / path_lists.TRAIN, path / path_lists.TEST, spec=path)
        for find, read in ((oxford.find_pets, oxford.pets_source), (oxford.find_flowers, oxford.flowers_source)):
            folder = find(path)
            if folder is not None:
                _refuse(options, *options.given, what=f"{path} has held-out images of its own")
                return read(folder, unpacking=unpacking)
        with os.scandir(path) as entries:  # folders train, test and meta are no CIFAR-100
            names = {entry.name for entry in entries if entry.is_file()}
        held = path if cifar.is_cifar(names) or path.name in cifar.FOLDERS else cifar.in_folder(path)
        if held is None:
            return None
        _refuse(options, "--val", "--val-labels", what=f"{held} has held-out images of its own")
        return cifar.cifar_source(open_tree(held, unpacking=unpacking), labels=options.cifar_labels)
    if path.name in oxford.FLOWERS_IMAGES:
        _refuse(options, *options.given, what=f"{path} has held-out images of its own")
        return oxford.flowers_source(path.parent, unpacking=unpacking)
    tree = open_tree(path, unpacking=unpacking)
    first = [*islice(tree.names, _PEEKED_FILES)]
    if path.name in oxford.PETS_IMAGES and any(map(oxford.is_pet, first)):
        _refuse(options, *options.given, what=f"{path} has held-out images of its own")
        return oxford.pets_source(path.parent, unpacking=unpacking)
    if any(part in cifar.FOLDERS for name in first for part in name.split("/")[:-1]):
        _refuse(options, "--val", "--val-labels", what=f"{path} has held-out images of its own")
        return cifar.cifar_source(tree, labels=options.cifar_labels)
    return None


def _refuse(options: Published, *flags: str, what: str) -> None:
    given = [flag for flag in flags if flag in options.given]
    if given:
        raise UserError(f"{given[0]}: {what}; leave it out")

"""Open what the user typed: a known name first, otherwise the names inside the folder or archive decide what it is."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from data_shards.errors import UserError
from data_shards.packing.sources import cifar, imagenet, oxford, path_lists
from data_shards.packing.sources.archive import Unpacking
from data_shards.packing.sources.arrays import IDX_NAMES, digits_source, fashion_mnist_source, idx_source
from data_shards.packing.sources.base import SUFFIXES, Source
from data_shards.packing.sources.folder import folder_source
from data_shards.packing.sources.label_list import LabelList, label_list_source
from data_shards.packing.sources.tree import is_archive, open_tree

_NAMES = ("digits", "fashion-mnist")
_LAYOUT = (
    "ROOT/CLASS/*.jpg, ROOT/train/CLASS/*.jpg with ROOT/val/CLASS/*.jpg (and ROOT/test), MNIST's four IDX files, or "
    "the files of ImageNet, CIFAR, Pets, Flowers or VTAB under their published names"
)
_PEEKED_FILES = 100


@dataclass(frozen=True)
class Published:
    """Where the other parts of a published set are."""

    val: Path | None = None  # held-out images, unless they lie beside the training images
    val_labels: Path | None = None
    cifar_labels: cifar.CifarLabels = "fine"

    @property
    def flags(self) -> list[str]:
        """The flags that were given."""
        given = {
            "--val": self.val is not None,
            "--val-labels": self.val_labels is not None,
            "--superclasses": self.cifar_labels != "fine",
        }
        return [flag for flag, is_given in given.items() if is_given]

    def refuse(self, *flags: str, because: str) -> None:
        """Raise UserError if one of `flags` (none named: any) was given."""
        if given := [flag for flag in self.flags if flag in flags or not flags]:
            raise UserError(f"{given[0]}: {because}; leave it out")


def open_source(
    spec: str,
    *,
    labels: LabelList | None = None,
    published: Published = Published(),
    unpacking: Unpacking = Unpacking(),  # noqa: B008 - frozen
    unfit: Literal["refuse", "skip"] = "refuse",
) -> Source:
    """Open `digits`, `fashion-mnist`, a folder (write `./digits` for a folder of that name), an archive or a list.

    `labels` takes labels from a list instead of the layout. Gzipped archives are decompressed as `unpacking` says.
    `unfit` refuses (UserError) or skips class folders without images and images beside class folders.
    """
    if labels is not None and spec in _NAMES:
        raise UserError(f"{spec}: these images have labels of their own; leave out labels or give a folder")
    if labels is not None or spec in _NAMES:
        published.refuse(because="it is for published data sets with labels of their own")
    if spec == "digits":
        return digits_source()
    if spec == "fashion-mnist":
        return fashion_mnist_source()
    root = Path(spec).expanduser()
    if not root.exists():
        raise UserError(f"{spec}: there is no such folder, and no source of that name (names: {', '.join(_NAMES)})")
    if labels is not None and not root.is_dir():
        raise UserError(f"{spec}: --labels names files in a folder, and this is a file; unpack it and give the folder")
    source = None
    if root.is_dir():
        try:
            names = os.listdir(root)
        except OSError as error:
            raise UserError(f"{spec}: the folder cannot be listed ({error.strerror})") from None
        if not names:
            raise UserError(f"{spec}: the folder is empty; expected is {_LAYOUT}")
        if labels is not None:
            return label_list_source(root, labels)
        if any(name.removesuffix(".gz") in IDX_NAMES for name in names):
            source = idx_source(root)
    if source is None:
        source = _published_source(root, published, unpacking=unpacking, unfit=unfit)
        if source is not None:
            return source
        if not root.is_dir():
            raise UserError(
                f"{spec}: this is a file, and no archive ({', '.join(SUFFIXES)}) or list (.txt); give a folder laid "
                f"out as {_LAYOUT}"
            )
        source = folder_source(root, unfit=unfit)
    published.refuse(because=f"{source.spec} is no published set that it is for")
    return source


def _published_source(
    path: Path, options: Published, *, unpacking: Unpacking, unfit: Literal["refuse", "skip"]
) -> Source | None:
    """Open the published set at `path`; None for a folder that is none.

    Raises UserError for an unknown file, a missing part, and an option that means nothing for the set.
    """
    if path.is_file() and path.suffix == ".txt":
        options.refuse("--val-labels", "--superclasses", because=f"{path} is a list of images with their classes")
        return path_lists.path_lists_source(path, options.val, spec=path)
    if path.is_file() and not is_archive(path):
        return None
    source = _with_own_splits(path, options, unpacking=unpacking)
    if source is not None:
        return source
    parts = imagenet.Parts(path)
    if path.is_dir():
        parts = imagenet.find_parts(path, labelled=options.val_labels is not None)
        if parts is None and options.val is None:
            return None
        parts = parts or imagenet.Parts(path)
    options.refuse("--superclasses", because=f"{path} is not CIFAR-100")
    if options.val is not None:
        if not options.val.exists():
            raise UserError(f"--val: {options.val} is not there; give the folder or archive of the held-out images")
        parts = replace(parts, val=options.val, val_labels=options.val_labels)
    elif options.val_labels is not None:
        parts = replace(parts, val_labels=options.val_labels)
    return imagenet.class_source(parts, spec=path, unpacking=unpacking, unfit=unfit)


def _with_own_splits(path: Path, options: Published, *, unpacking: Unpacking) -> Source | None:
    """Open a set whose own files say what is held out."""
    own = f"{path} has held-out images of its own"
    if path.is_dir():
        train, test = path / path_lists.TRAIN, path / path_lists.TEST
        if train.is_file():
            options.refuse(because=f"{path} has its test images in {test.name}")
            if not test.is_file():
                raise UserError(f"{path}: {test.name} is missing, which has to lie beside {train.name}")
            return path_lists.path_lists_source(train, test, spec=path)
        for find, read in ((oxford.find_pets, oxford.pets_source), (oxford.find_flowers, oxford.flowers_source)):
            if (folder := find(path)) is not None:
                options.refuse(because=own)
                return read(folder, unpacking=unpacking)
        held = cifar.find_cifar(path)
        if held is None:
            return None
        options.refuse("--val", "--val-labels", because=f"{held} has held-out images of its own")
        return cifar.cifar_source(open_tree(held, unpacking=unpacking), labels=options.cifar_labels)
    if path.name in oxford.FLOWERS_IMAGES:
        options.refuse(because=own)
        return oxford.flowers_source(path.parent, unpacking=unpacking)
    tree = open_tree(path, unpacking=unpacking)
    first = [*islice(tree.names, _PEEKED_FILES)]
    if path.name in oxford.PETS_IMAGES and any(map(oxford.is_pet, first)):
        options.refuse(because=own)
        return oxford.pets_source(path.parent, unpacking=unpacking)
    if any(part in cifar.FOLDERS for name in first for part in name.split("/")[:-1]):
        options.refuse("--val", "--val-labels", because=own)
        return cifar.cifar_source(tree, labels=options.cifar_labels)
    return None

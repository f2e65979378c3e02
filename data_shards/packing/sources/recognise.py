"""Recognise SOURCE: a known name, or else by the names inside the folder or archive."""

import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources import arrays, imagenet, oxford
from shardvit.data_shards.packing.sources.archive import Unpacking, is_archive, open_files
from shardvit.data_shards.packing.sources.base import SUFFIXES, Source, Unfit
from shardvit.data_shards.packing.sources.elsewhere import elsewhere_source, tree_source
from shardvit.data_shards.packing.sources.label_list import (
    VTAB_TEST,
    VTAB_TRAIN,
    LabelList,
    path_lists_source,
)
from shardvit.data_shards.packing.sources.tars.samples import ONLY_SAMPLES, SampleOptions
from shardvit.data_shards.packing.sources.tree import local_tree

_NAMED = {"digits": arrays.digits_source, "fashion-mnist": arrays.fashion_mnist_source}
_LAYOUT = (
    "ROOT/CLASS/*.jpg, ROOT/train/CLASS/*.jpg with ROOT/val/CLASS/*.jpg (and ROOT/test), MNIST's four IDX files, or "
    "the files of ImageNet, CIFAR, Pets, Flowers or VTAB under their published names"
)
_PEEKED_FILES = 100


@dataclass(frozen=True)
class Published:
    """Options for published sets."""

    val: Path | None = None  # held-out images stored elsewhere
    val_labels: Path | None = None
    cifar_labels: arrays.CifarLabels = "fine"

    def refuse(self, *flags: str, because: str) -> None:
        """Raise UserError if one of `flags` (default: any) was given."""
        coarse = self.cifar_labels != "fine"
        given = {"--val": self.val is not None, "--val-labels": self.val_labels is not None, "--superclasses": coarse}
        for flag in flags or given:
            if given[flag]:
                raise UserError(f"{flag}: {because}; leave it out")


def open_source(
    spec: str,
    *,
    labels: LabelList | None = None,
    published: Published = Published(),
    samples: SampleOptions = SampleOptions(),  # noqa: B008 - frozen
    unpacking: Unpacking = Unpacking(),  # noqa: B008 - frozen
    unfit: Unfit = "refuse",
) -> Source:
    """Open `digits`, `fashion-mnist`, a folder (`./digits` for one of that name), an archive, a list, a URL or tars.

    `labels` replaces the layout's labels. `unfit`: refuse (UserError) or skip empty class folders and stray images.
    """
    named = _NAMED.get(spec) if samples.where is None else None
    if named and (labels is not None or samples != SampleOptions()):
        raise UserError(f"{spec}: these images have labels of their own; leave out labels or give a folder")
    if labels is not None or named:
        published.refuse(because="it is for published data sets with labels of their own")
    if named:
        return named()
    if source := elsewhere_source(spec, samples, labels=labels, unpacking=unpacking, unfit=unfit):
        published.refuse(because=f"{source.spec} is no published set that it is for")
        return source
    root = Path(spec).expanduser()
    if not root.exists():
        raise UserError(f"{spec}: there is no such folder, and no source of that name (names: {', '.join(_NAMED)})")
    if not root.is_dir():
        if samples != SampleOptions():
            raise UserError(f"{spec}: {ONLY_SAMPLES}")
        if labels is not None:
            raise UserError(f"{spec}: --labels names files in a folder, and this is a file; give the folder")
        if source := _published_file(root, published, unpacking=unpacking, unfit=unfit):
            return source
        raise UserError(
            f"{spec}: this is a file, and no archive ({', '.join(SUFFIXES)}) or list (.txt); give a folder laid out as "
            f"{_LAYOUT}"
        )
    try:
        names = os.listdir(root)
    except OSError as error:
        raise UserError(f"{spec}: the folder cannot be listed ({error.strerror})") from None
    if not names:
        raise UserError(f"{spec}: the folder is empty; expected is {_LAYOUT}")
    if labels is None and any(name.removesuffix(".gz") in arrays.IDX_NAMES for name in names):
        source = arrays.idx_source(root)
    else:
        is_plain = labels is None and samples == SampleOptions()
        if is_plain and (source := _published_folder(root, published, unpacking=unpacking, unfit=unfit)):
            return source
        source = tree_source(local_tree(root), samples, labels=labels, unpacking=unpacking, unfit=unfit)
    published.refuse(because=f"{source.spec} is no published set that it is for")
    return source


def _published_file(path: Path, options: Published, *, unpacking: Unpacking, unfit: Unfit) -> Source | None:
    if path.suffix == ".txt":
        options.refuse("--val-labels", "--superclasses", because=f"{path} is a list of images with their classes")
        return path_lists_source(path, options.val, spec=path)
    if not is_archive(path):
        return None
    own = f"{path} has held-out images of its own"
    if path.name in oxford.FLOWERS_IMAGES:
        options.refuse(because=own)
        return oxford.flowers_source(path.parent, unpacking=unpacking)
    files = open_files(path, unpacking=unpacking)
    first = [*islice(files.names, _PEEKED_FILES)]
    if path.name in oxford.PETS_IMAGES and any(map(oxford.is_pet, first)):
        options.refuse(because=own)
        return oxford.pets_source(path.parent, unpacking=unpacking)
    if any(part in arrays.CIFAR_FOLDERS for name in first for part in name.split("/")[:-1]):
        options.refuse("--val", "--val-labels", because=own)
        return arrays.cifar_source(files, labels=options.cifar_labels)
    return _class_source(path, imagenet.Parts(path), options, unpacking=unpacking, unfit=unfit)


def _published_folder(path: Path, options: Published, *, unpacking: Unpacking, unfit: Unfit) -> Source | None:
    train, test = path / VTAB_TRAIN, path / VTAB_TEST
    if train.is_file():
        options.refuse(because=f"{path} has its test images in {test.name}")
        if not test.is_file():
            raise UserError(f"{path}: {test.name} is missing, which has to lie beside {train.name}")
        return path_lists_source(train, test, spec=path)
    for find, read in ((oxford.find_pets, oxford.pets_source), (oxford.find_flowers, oxford.flowers_source)):
        if (folder := find(path)) is not None:
            options.refuse(because=f"{path} has held-out images of its own")
            return read(folder, unpacking=unpacking)
    if (held := arrays.find_cifar(path)) is not None:
        options.refuse("--val", "--val-labels", because=f"{held} has held-out images of its own")
        return arrays.cifar_source(open_files(held, unpacking=unpacking), labels=options.cifar_labels)
    parts = imagenet.find_parts(path, labelled=options.val_labels is not None)
    if parts is None and options.val is None:
        return None
    return _class_source(path, parts or imagenet.Parts(path), options, unpacking=unpacking, unfit=unfit)


def _class_source(
    path: Path, parts: imagenet.Parts, options: Published, *, unpacking: Unpacking, unfit: Unfit
) -> Source:
    options.refuse("--superclasses", because=f"{path} is not CIFAR-100")
    if options.val is not None:
        if not options.val.exists():
            raise UserError(f"--val: {options.val} is not there; give the folder or archive of the held-out images")
        parts = parts._replace(val=options.val, val_labels=options.val_labels)
    elif options.val_labels is not None:
        parts = parts._replace(val_labels=options.val_labels)
    return imagenet.class_source(parts, spec=path, unpacking=unpacking, unfit=unfit)

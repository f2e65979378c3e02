"""From what the user typed to a Source: a known name first, otherwise a folder or archive whose content decides."""

from pathlib import Path
from typing import Literal

from data_shards.errors import UserError
from data_shards.packing.sources.archive import Unpacking
from data_shards.packing.sources.arrays import IDX_NAMES, digits_source, fashion_mnist_source, idx_source
from data_shards.packing.sources.base import SUFFIXES, Source
from data_shards.packing.sources.folder import folder_source
from data_shards.packing.sources.label_list import LabelList, label_list_source
from data_shards.packing.sources.published.recognise import Published, published_source

NAMES = ("digits", "fashion-mnist")
LAYOUT = (
    "ROOT/CLASS/*.jpg, ROOT/train/CLASS/*.jpg with ROOT/val/CLASS/*.jpg (and ROOT/test), MNIST's four IDX files, or "
    "the files of ImageNet, CIFAR, Pets, Flowers or VTAB under their published names"
)


def open_source(
    spec: str,
    *,
    labels: LabelList | None = None,
    published: Published = Published(),  # noqa: B008 - frozen
    unpacking: Unpacking = Unpacking(),  # noqa: B008 - frozen
    unfit: Literal["refuse", "skip"] = "refuse",
) -> Source:
    """Open `digits`, `fashion-mnist`, a folder (write `./digits` for a folder of that name), an archive or a list.

    With `labels`, a folder's images have their labels from that list, whatever the layout. `published` says where the
    other parts of a published set are, `unpacking` where gzipped archives are decompressed. `unfit`: whether class
    folders without images, and images beside class folders, are refused (UserError) or left out with a note.
    """
    if labels is not None and spec in NAMES:
        raise UserError(f"{spec}: these images have labels of their own; leave out labels or give a folder")
    if published.given and (labels is not None or spec in NAMES):
        raise UserError(f"{published.given[0]}: it is for published data sets with labels of their own; leave it out")
    if spec == "digits":
        return digits_source()
    if spec == "fashion-mnist":
        return fashion_mnist_source()
    root = Path(spec).expanduser()
    if not root.exists():
        raise UserError(f"{spec}: there is no such folder, and no source of that name (names: {', '.join(NAMES)})")
    if labels is not None and not root.is_dir():
        raise UserError(f"{spec}: --labels names files in a folder, and this is a file; unpack it and give the folder")
    if root.is_dir():
        try:
            names = {entry.name for entry in root.iterdir()}
        except OSError as error:
            raise UserError(f"{spec}: the folder cannot be listed ({error.strerror})") from None
        if not names:
            raise UserError(f"{spec}: the folder is empty; expected is {LAYOUT}")
        if labels is not None:
            return label_list_source(root, labels)
        if any(name.removesuffix(".gz") in IDX_NAMES for name in names):
            return _plain(published, idx_source(root))
    source = published_source(root, published, unpacking=unpacking, unfit=unfit)
    if source is not None:
        return source
    if not root.is_dir():
        raise UserError(
            f"{spec}: this is a file, and no archive ({', '.join(SUFFIXES)}) or list (.txt); give a folder laid out as "
            f"{LAYOUT}"
        )
    return _plain(published, folder_source(root, unfit=unfit))


def _plain(published: Published, source: Source) -> Source:
    if published.given:
        raise UserError(f"{published.given[0]}: {source.spec} is no published set that it is for; leave it out")
    return source

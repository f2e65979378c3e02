"""From what the user typed to a Source: a known name first, otherwise a folder whose content decides."""

from pathlib import Path
from typing import Literal

from data_shards.errors import UserError
from data_shards.sources.arrays import IDX_NAMES, digits_source, fashion_mnist_source, idx_source
from data_shards.sources.base import Source
from data_shards.sources.folder import folder_source
from data_shards.sources.label_list import LabelList, label_list_source

NAMES = ("digits", "fashion-mnist")
LAYOUT = "ROOT/CLASS/*.jpg, ROOT/train/CLASS/*.jpg with ROOT/val/CLASS/*.jpg (and ROOT/test), or MNIST's four IDX files"


def open_source(spec: str, *, labels: LabelList | None = None, unfit: Literal["refuse", "skip"] = "refuse") -> Source:
    """Open `digits`, `fashion-mnist`, or a folder (write `./digits` for a folder of that name).

    With `labels`, a folder's images have their labels from that list, whatever the layout. `unfit`: whether class
    folders without images, and images beside class folders, are refused (UserError) or left out with a note.
    """
    if labels is not None and spec in NAMES:
        raise UserError(f"{spec}: these images have labels of their own; leave out labels or give a folder")
    if spec == "digits":
        return digits_source()
    if spec == "fashion-mnist":
        return fashion_mnist_source()
    root = Path(spec).expanduser()
    if not root.exists():
        raise UserError(f"{spec}: there is no such folder, and no source of that name (names: {', '.join(NAMES)})")
    if not root.is_dir():
        raise UserError(f"{spec}: this is a file; give a folder laid out as {LAYOUT}")
    try:
        names = {entry.name for entry in root.iterdir()}
    except OSError as error:
        raise UserError(f"{spec}: the folder cannot be listed ({error.strerror})") from None
    if not names:
        raise UserError(f"{spec}: the folder is empty; expected is {LAYOUT}")
    if labels is not None:
        return label_list_source(root, labels)
    if any(name.removesuffix(".gz") in IDX_NAMES for name in names):
        return idx_source(root)
    return folder_source(root, unfit=unfit)

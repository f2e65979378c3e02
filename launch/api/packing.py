"""`shardvit.pack`: the command as a function."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardvit.data_shards.shards.shard_set import Report
from shardvit.data_shards.vocabulary import USUAL_MOST_PIXELS
from shardvit.launch.api.running import PathLike
from shardvit.launch.commands.data.pack import PackOptions

if TYPE_CHECKING:
    from shardvit.data_shards.packing.found import PackReport


def pack(
    source: PathLike,
    out: PathLike,
    *,
    name: str | None = None,
    labels: PathLike | None = None,
    path_column: str | None = None,
    label_column: str | None = None,
    class_names: PathLike | None = None,
    val: PathLike | None = None,
    val_labels: PathLike | None = None,
    superclasses: bool = False,
    classes: Sequence[str] | None = None,
    keep_classes: bool = False,
    holdout: float | None = None,
    holdout_images: int | None = None,
    holdout_list: PathLike | None = None,
    samples_per_shard: int | None = None,
    shard_size: str | None = None,
    resize_short: int | None = None,
    quality: int | None = None,
    max_image_pixels: int = USUAL_MOST_PIXELS,
    drop_duplicates: bool = False,
    exclude_matches_of: Sequence[str] | None = None,
    verify: bool = False,
    skip_unreadable: bool = False,
    seed: int = 0,
    report: Report = print,
) -> PackReport:
    """Pack images into WebDataset shards with a manifest, as `shardvit pack` does; called again, it resumes.

    Args:
        source: a folder or tar of class folders, "digits", or a data set as published.
        out: gets a folder per split.
        name: the data set's, in file names too; None: `out`'s.
        labels: CSV or JSONL of paths and labels, instead of class folders.
        path_column: of `labels`; None: path.
        label_column: of `labels`; None: label.
        class_names: file of the names of classes 0, 1, ... of `labels`.
        val: published val images elsewhere.
        val_labels: their classes.
        superclasses: CIFAR-100's 20 superclasses.
        classes: only these; they get labels 0, 1, ...
        keep_classes: accept a single class, or names differing in case or spaces.
        holdout: share of each class to hold out as "val".
        holdout_images: number of images to hold out, whatever their classes.
        holdout_list: file of paths to hold out.
        samples_per_shard: most images in a tar; None: 1000.
        shard_size: size of a tar instead, such as "256MB".
        resize_short: shrink larger short sides to this.
        quality: JPEG quality of shrunk images; None: 90.
        max_image_pixels: do not decode larger images.
        drop_duplicates: pack only the first of equal files.
        exclude_matches_of: leave out training images found in these shards.
        verify: if `out` is packed, compare all bytes.
        skip_unreadable: skip and list unreadable images.
        seed: of the shuffle and the held-out choice.
        report: gets lines of progress.

    Returns:
        A frozen record: `train`, `val`, `num_images`, `counts` of duplicates and unreadable images.

    Raises:
        UserError: bad input, an `out` of another source, unreadable images, a full disk.

    Example:
        shardvit.pack("digits", "shards", holdout=0.2)
    """
    from shardvit.data_shards.packing.pack import pack as pack_images

    given: dict[str, Any] = {
        each: value for each, value in locals().items() if each in PackOptions.__dataclass_fields__
    }
    paths = ("labels", "class_names", "val", "val_labels", "holdout_list")
    given |= {each: Path(given[each]) for each in paths if given[each] is not None}
    given |= {each: list(given[each]) for each in ("classes", "exclude_matches_of") if given[each] is not None}
    flags: Any = given | {"classes": None}  # there it is text
    request = PackOptions(**flags).request() | {"classes": given["classes"]}
    return pack_images(os.fspath(source), Path(out), report=report, **request)

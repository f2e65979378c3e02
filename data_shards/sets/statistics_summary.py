"""Summarise a set's `statistics.parquet`: sizes, classes, moments, copies, and the most extreme images.

Reads only the columns that it needs, a row group at a time, here or in a store by ranges: 10^8 rows take some minutes
and, as bytes are counted to 0.2 %, some megabytes. Knows the set only from the table.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.sets.statistics import CHANNELS, STATISTICS_FILE, moment_names, open_table, read_facts
from shardvit.data_shards.shards.location import join, redacted
from shardvit.data_shards.shards.manifest import split_manifest
from shardvit.data_shards.store.folders import open_folder
from shardvit.data_shards.store.ranges import RangedFile

_MOST_EXTREME = 5
LEVELS = 8  # of 256, in a bin of means and deviations
_STEP = 1.002  # of the bins of aspect and bytes
_SIDES = ("width", "height")
_Scored = tuple[float, int, int]  # smallest first; row group, row in it
_COLUMNS = ["shard", "row", "labels", "width", "height", "bytes", "duplicate"]  # and the moments


class Bins(NamedTuple):
    """Values and how often each was counted."""

    values: NDArray[np.float64]
    counts: NDArray[np.int64]


class ExtremeImage(NamedTuple):
    """An image that has most of something, or least."""

    what: str  # "widest"
    key: str
    shard: str
    width: int
    height: int
    bytes: int


class Moments(NamedTuple):
    """Of all pixels by channel, colours from 0 to 1, channels as `images.channels` reads them."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    images: int


@dataclass
class SetStatistics:
    """What a table says of a split; moments are of images, each of the same weight."""

    location: str
    name: str
    split: str
    classes: tuple[str, ...]
    is_multi_label: bool
    shards: tuple[str, ...]
    unreadable: int  # left out by packing, or not decoded by `check`
    images: int = 0  # readable
    duplicates: int = 0
    bytes: int = 0
    extremes: tuple[ExtremeImage, ...] = ()
    channels: int = 0  # of images read as they are, with moments as they were read; 0: colours, with moments to 255

    def __post_init__(self) -> None:
        self.images_of_class = np.zeros(len(self.classes), np.int64)
        self.labels_an_image = Counter[int]()
        self.sizes = {name: Counter[int]() for name in ("width", "height", "aspect", "bytes")}  # see `bins`
        self.moments = np.zeros((6, 256 // LEVELS), np.int64)  # images by level, of colours
        self.sums = np.zeros((2, self.channels or len(CHANNELS)))  # of means, of mean squares
        self._top = 1 if self.channels else 255

    @property
    def mean(self) -> NDArray[np.float64]:
        """Of all pixels, from 0 to 1, red, green, blue; of channels as `images.channels` reads them."""
        return self.sums[0] / max(self.images, 1) / self._top

    @property
    def std(self) -> NDArray[np.float64]:
        """Of all pixels about that mean, from 0 to 1."""
        return np.sqrt(np.maximum(self.sums[1] / max(self.images, 1) / self._top**2 - self.mean**2, 0))

    def bins(self, what: str) -> Bins:
        """Counts of "width" and "height"; of "aspect" (width / height) and "bytes" to 0.2 %."""
        values, counts = np.array(sorted(self.sizes[what].items()), np.int64).reshape(-1, 2).T
        return Bins(values.astype(float) if what in _SIDES else _STEP ** values.astype(float), counts)


def summarise(location: str) -> SetStatistics:
    """Read the table of a split, SET/SPLIT or the file itself; a path or a URL. UserError if there is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not location.endswith(".parquet"):
        location = join(split_manifest(location)[0], STATISTICS_FILE)
    shown = redacted(location)
    try:
        file = pq.ParquetFile(RangedFile(location))
        facts = read_facts(file.schema_arrow.metadata)
        classes, shards = tuple(map(str, facts["classes"])), tuple(map(str, facts["shards"]))
        name, split, is_multi_label = str(facts["name"]), str(facts["split"]), facts["labels"] == "multi"
        its = (shown, name, split, classes, is_multi_label, shards, sum(facts["unreadable"]))
        made = SetStatistics(*its, channels=int(facts.get("channels", 0)))
        columns = [*_COLUMNS, *moment_names(made.channels)]
        best: dict[str, list[_Scored]] = {}
        for group in range(file.num_row_groups):
            _add(made, file.read_row_group(group, columns=columns), group=group, best=best)
        made.extremes = tuple(_named(file, made, best))
    except FileNotFoundError:
        raise UserError(
            f"{shown}: there is no such table: make it with `shardvit check SET --decode --statistics`"
        ) from None
    except (OSError, KeyError, ValueError, TypeError, IndexError, pa.ArrowException) as error:
        reason = str(error) or type(error).__name__
        raise UserError(f"{shown}: is no table of a set's statistics ({reason}); make it again") from None
    return made


def mean_and_std(location: str) -> Moments | None:
    """Mean and deviation of all pixels of a packed split, each image with the same weight, from the columns of moments
    alone: 8 bytes an image and channel are read. None without a table; UserError if it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if (table := open_table(open_folder(split_manifest(location)[0]))) is None:
            return None
        with pq.ParquetFile(table) as file:
            channels = int(read_facts(file.schema_arrow.metadata).get("channels", 0))
            sums, images, top = np.zeros((2, channels or len(CHANNELS))), 0, 1 if channels else 255
            for group in range(file.num_row_groups):
                columns = file.read_row_group(group, columns=moment_names(channels))
                moments = np.stack(
                    [columns.column(name).to_numpy().astype(np.float64) for name in columns.column_names]
                )
                means, stds = np.split(moments[:, np.isfinite(moments[0])] / top, 2)
                sums += np.stack([means.sum(axis=1), (means**2 + stds**2).sum(axis=1)])
                images += means.shape[1]
    except (OSError, KeyError, ValueError, TypeError, IndexError, pa.ArrowException) as error:
        reason = str(error) or type(error).__name__
        shown = redacted(join(split_manifest(location)[0], STATISTICS_FILE))
        raise UserError(f"{shown}: is no table of a set's statistics ({reason}); make it again") from None
    mean = sums[0] / max(images, 1)
    return Moments(
        tuple(mean.tolist()), tuple(np.sqrt(np.maximum(sums[1] / max(images, 1) - mean**2, 0)).tolist()), images
    )


def _add(made: SetStatistics, table: Any, *, group: int, best: dict[str, list[_Scored]]) -> None:
    at = np.flatnonzero(is_readable := table.column("width").to_numpy() > 0)
    made.unreadable += len(table) - len(at)
    table = table.filter(is_readable)
    made.images += len(table)
    made.duplicates += int(table.column("duplicate").to_numpy().sum())
    labels = table.column("labels").combine_chunks()
    made.images_of_class += np.bincount(labels.flatten().to_numpy(), minlength=len(made.classes))
    made.labels_an_image.update(_counted(labels.value_lengths().to_numpy()))
    width, height, num_bytes = (table.column(name).to_numpy().astype(np.float64) for name in _COLUMNS[3:6])
    made.bytes += int(num_bytes.sum())
    sizes = {"width": width, "height": height, "aspect": width / height, "bytes": num_bytes}
    for name, values in sizes.items():
        rounded = values if name in _SIDES else np.rint(np.log(values) / np.log(_STEP))
        made.sizes[name].update(_counted(rounded.astype(np.int64)))
    moments = np.stack([table.column(name).to_numpy().astype(np.float64) for name in moment_names(made.channels)])
    for counts, values in zip(made.moments, moments, strict=True) if not made.channels else ():
        counts += np.bincount(np.clip(values, 0, 255).astype(np.int64) // LEVELS, minlength=len(counts))
    means, stds = np.split(moments, 2)
    made.sums += np.stack([means.sum(axis=1), (means**2 + stds**2).sum(axis=1)])
    ranked = {
        ("smallest", "largest"): width * height,
        ("narrowest", "widest"): sizes["aspect"],
        ("fewest bytes", "most bytes"): num_bytes,
        ("darkest", "brightest"): means.mean(axis=0),
        ("flattest", "most contrast"): stds.mean(axis=0),
    }
    for (least, most), values in ranked.items():
        for what, scores in ((least, -values), (most, values)):
            entries = [
                (-float(scores[row]), group, int(at[row]))
                for row in np.argsort(-scores, kind="stable")[:_MOST_EXTREME].tolist()
            ]
            best[what] = sorted(best.get(what, []) + entries)[:_MOST_EXTREME]


def _named(file: Any, made: SetStatistics, best: dict[str, list[_Scored]]) -> list[ExtremeImage]:
    """Read the names of the extreme images, and no other row groups."""
    found: dict[tuple[int, int], tuple[Any, ...]] = {}
    for group in {group for entries in best.values() for _, group, _ in entries}:
        table = file.read_row_group(group, columns=["key", "shard", *_COLUMNS[3:6]])
        rows = {row for entries in best.values() for _, its, row in entries if its == group}
        found |= {(group, row): tuple(table.slice(row, 1).to_pylist()[0].values()) for row in rows}
    places = [(what, *found[group, row]) for what, entries in best.items() for _, group, row in entries]
    return [ExtremeImage(what, key, made.shards[shard], *size) for what, key, shard, *size in places]


def _counted(values: NDArray[Any]) -> dict[int, int]:
    found, counts = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))

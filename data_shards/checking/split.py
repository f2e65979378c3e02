"""The parts of one split put together: where each sample is, and the split in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_shards.checking.findings import Place
from data_shards.checking.scan import Part, PartScan
from data_shards.shard_set import ShardSet

_MOST_UNPACKED = 64  # parts


@dataclass(frozen=True)
class Spread:
    """The least, the median and the most of some numbers."""

    least: float
    median: float
    most: float


@dataclass(frozen=True)
class SplitSummary:
    """One split in numbers; what was lost is not in them.

    Attributes:
        source: where it lies, fit to be shown.
        split: "train", "val", ...
        name: of the data set.
        digest: of its content.
        num_samples: that were found.
        num_stated: samples that the manifest states.
        classes: names of the classes.
        is_multi_label: whether a sample has any number of labels.
        class_counts: samples of each class.
        num_shards: tars.
        num_bytes: of all tars.
        shard_samples: samples of a shard.
        shard_bytes: size of a tar.
        image_bytes: size of an encoded image.
        formats: images of each format.
        heights: in pixels; None if nothing was decoded.
        widths: likewise.
        decode_ms: CPU time to decode one image in full on one core; None if nothing was decoded.
    """

    source: str
    split: str
    name: str
    digest: str
    num_samples: int
    num_stated: int
    classes: tuple[str, ...]
    is_multi_label: bool
    class_counts: tuple[int, ...]
    num_shards: int
    num_bytes: int
    shard_samples: Spread | None
    shard_bytes: Spread | None
    image_bytes: Spread | None
    formats: dict[str, int]
    heights: Spread | None
    widths: Spread | None
    decode_ms: float | None


class SplitScan:
    """The parts of one split put together; samples are numbered through.

    Attributes:
        shards: the set as it was opened.
        parts: what was found in each part, in the set's order.
        sizes: samples that were found in each shard.
        shard_bytes: size of each tar; None for one that is not there.
    """

    def __init__(self, shards: ShardSet, parts: Sequence[PartScan]) -> None:
        self.shards = shards
        self.parts = parts
        self.first_sample = np.cumsum([0, *(part.num_samples for part in parts)])
        self._keys: dict[int, list[str]] = {}  # of the parts that were asked for last
        folders = {shard.name.rpartition("/")[0] for shard in shards.shards}
        self._common = folders.pop() if len(folders) == 1 else shards.source
        self.sizes = [0] * len(shards.shards)
        self.shard_bytes: list[int | None] = [None] * len(shards.shards)
        for part in parts:
            self.sizes[part.part.shard] += part.num_samples
            if part.part.number == 0:
                self.shard_bytes[part.part.shard] = part.num_bytes

    @property
    def num_samples(self) -> int:
        return int(self.first_sample[-1])

    def all(self, name: str) -> NDArray[Any]:
        """An array of the parts, end to end."""
        nothing = PartScan(Part(0, 0, 1))  # a set without shards has arrays, too
        return np.concatenate([getattr(part, name) for part in (nothing, *self.parts)])

    def class_counts(self) -> list[int]:
        """Samples of each class."""
        counts: Counter[int] = Counter()
        for part in self.parts:
            counts.update(part.class_counts)
        return [counts[number] for number in range(self.shards.num_classes)]

    def shard_name(self, shard: int) -> str:
        """Short, if all shards are in one folder or below the set's."""
        return self.shards.shards[shard].name.removeprefix(f"{self._common.rstrip('/')}/")

    def place(self, sample: int, detail: str = "") -> Place:
        """Where a sample is."""
        number = int(np.searchsorted(self.first_sample, sample, side="right")) - 1
        if number not in self._keys:
            if len(self._keys) == _MOST_UNPACKED:
                self._keys.clear()
            self._keys[number] = self.parts[number].keys
        key = self._keys[number][sample - int(self.first_sample[number])]
        return Place(self.shard_name(self.parts[number].part.shard), key, detail)


def summary(scan: SplitScan) -> SplitSummary:
    """The split in numbers."""
    shards = scan.shards
    heights, widths = scan.all("heights"), scan.all("widths")
    formats: Counter[str] = Counter()
    for part in scan.parts:
        formats.update(part.formats)
    known_bytes = [num_bytes for num_bytes in scan.shard_bytes if num_bytes is not None]
    seconds = sum(part.decode_seconds for part in scan.parts)
    return SplitSummary(
        source=shards.source,
        split=shards.split,
        name=shards.name,
        digest=shards.digest,
        num_samples=scan.num_samples,
        num_stated=shards.num_samples,
        classes=shards.classes,
        is_multi_label=shards.is_multi_label,
        class_counts=tuple(scan.class_counts()),
        num_shards=len(shards.shards),
        num_bytes=sum(known_bytes),
        shard_samples=spread(scan.sizes),
        shard_bytes=spread(known_bytes),
        image_bytes=spread(scan.all("image_bytes")),
        formats=dict(formats.most_common()),
        heights=spread(heights),
        widths=spread(widths),
        decode_ms=1000 * seconds / len(heights) if len(heights) else None,
    )


def spread(numbers: Sequence[int] | NDArray[Any]) -> Spread | None:
    """None where there are no numbers."""
    if not len(numbers):
        return None
    return Spread(float(np.min(numbers)), float(np.median(numbers)), float(np.max(numbers)))

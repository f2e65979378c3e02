"""One split: where each sample is, and the split in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_shards.checking.findings import FoundAt
from data_shards.checking.scan import SAMPLE, PartScan
from data_shards.shards.shard_set import ShardSet

_MOST_UNPACKED = 64  # parts


@dataclass(frozen=True)
class Spread:
    """Minimum, median and maximum."""

    min: float
    median: float
    max: float


@dataclass(frozen=True)
class SplitSummary:
    """One split in numbers, without lost samples; the fields are those of the JSON (see `page`)."""

    split: str
    name: str
    source: str
    digest: str
    samples: int
    samples_stated: int
    shards: int
    bytes: int
    multi_label: bool
    classes: dict[str, int]
    samples_per_shard: Spread | None
    bytes_per_shard: Spread | None
    bytes_per_image: Spread | None
    formats: dict[str, int]
    height: Spread | None
    width: Spread | None
    decode_ms: float | None


class SplitScan:
    """The parts of one split put together; samples are numbered across parts.

    `samples` is an array of `SAMPLE`, `sizes` the samples found in each shard, `shard_bytes` None for a missing tar,
    and `class_counts` the samples of each class.
    """

    def __init__(self, shards: ShardSet, parts: Sequence[PartScan]) -> None:
        self.shards = shards
        self.parts = parts
        self.samples = np.concatenate([np.empty(0, SAMPLE), *(part.samples for part in parts)])
        self.sizes = [0] * len(shards.shards)
        self.shard_bytes: list[int | None] = [None] * len(shards.shards)
        counts: Counter[int] = Counter()
        for part in parts:
            counts.update(part.class_counts)
            self.sizes[part.part.shard] += len(part.samples)
            if part.part.number == 0:
                self.shard_bytes[part.part.shard] = part.num_bytes
        self.class_counts = [counts[number] for number in range(shards.num_classes)]
        self._first_sample = np.cumsum([0, *(len(part.samples) for part in parts)])
        self._keys: dict[int, list[str]] = {}  # of the parts that were asked for last
        folders = {shard.name.rpartition("/")[0] for shard in shards.shards}
        self._common = folders.pop() if len(folders) == 1 else shards.source

    def shard_name(self, shard: int) -> str:
        """Short, if all shards are in one folder or below the set's."""
        return self.shards.shards[shard].name.removeprefix(f"{self._common.rstrip('/')}/")

    def place(self, sample: int, detail: str = "") -> FoundAt:
        number = int(np.searchsorted(self._first_sample, sample, side="right")) - 1
        if number not in self._keys:
            if len(self._keys) == _MOST_UNPACKED:
                self._keys.clear()
            self._keys[number] = self.parts[number].keys
        key = self._keys[number][sample - int(self._first_sample[number])]
        return FoundAt(self.shard_name(self.parts[number].part.shard), key, detail)

    def summary(self) -> SplitSummary:
        shards = self.shards
        formats: Counter[str] = Counter()
        for part in self.parts:
            formats.update(part.formats)
        known_bytes = [num_bytes for num_bytes in self.shard_bytes if num_bytes is not None]
        decoded = self.samples[self.samples["height"] > 0]
        seconds = sum(part.decode_seconds for part in self.parts)
        return SplitSummary(
            split=shards.split,
            name=shards.name,
            source=shards.source,
            digest=shards.digest,
            samples=len(self.samples),
            samples_stated=shards.num_samples,
            shards=len(shards.shards),
            bytes=sum(known_bytes),
            multi_label=shards.is_multi_label,
            classes=dict(zip(shards.classes, self.class_counts, strict=True)),
            samples_per_shard=spread(self.sizes),
            bytes_per_shard=spread(known_bytes),
            bytes_per_image=spread(self.samples["image_bytes"]),
            formats=dict(formats.most_common()),
            height=spread(decoded["height"]),
            width=spread(decoded["width"]),
            decode_ms=1000 * seconds / len(decoded) if len(decoded) else None,
        )


def spread(numbers: Sequence[int] | NDArray[Any]) -> Spread | None:
    """None for no numbers."""
    if not len(numbers):
        return None
    median = float(np.median(numbers))
    return Spread(int(np.min(numbers)), int(median) if median.is_integer() else median, int(np.max(numbers)))

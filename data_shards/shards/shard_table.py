"""The shards of an opened set: one entry each, or columns for sets with a manifest, 13 MB for 10^5 shards, not 100.

Picklable; NumPy is imported with the first table.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from data_shards.shards.labels import LabelSpec
from data_shards.shards.location import join, redacted
from data_shards.shards.manifest import MANIFEST_FILE
from data_shards.shards.packed_shards import PackedShards
from data_shards.vocabulary import PartName

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_BLOCK = 1024  # entries converted at once: a number of an array alone takes as long as fifty in a list
_UNKNOWN = -1  # times of a file that is missing or not local


@dataclass(frozen=True)
class Portion:
    """One of the two parts of a set (see `holdout`); `hold_out` is the held-out one's share, 0 to 1."""

    which: PartName
    hold_out: float

    def describe(self) -> str:
        return f"{'' if self.which == 'held_out' else 'all but '}{100 * self.hold_out:g} % held out"


@dataclass(frozen=True)
class ShardRows:
    """The samples of a tar that are in one part of its set; see `holdout.rows_of`."""

    number: int  # of the shard in the whole set
    stored: int  # samples in the tar
    held_out: int  # samples held out
    which: PartName


@dataclass(frozen=True)
class ShardEntry:
    """One tar of a set.

    `state` is "damaged" if the shard did not match the manifest on opening, and that was tolerated. `stamp` (times or
    the store's ETag on opening) changes when the file is written; "": unknown.
    """

    url: str  # an absolute local path, a URL that fsspec opens, or "pipe:COMMAND"
    name: str  # for messages; has no credentials
    num_samples: int  # used samples
    num_bytes: int | None  # the tar's size; None: unknown
    sha256: str  # digest of all its bytes; "": unknown
    index: Path | None  # a local index file; None: beside the tar, or built from it
    labels: LabelSpec
    state: Literal["whole", "damaged"] = "whole"
    stamp: str = ""
    index_digest: str = ""  # of the keys, image sizes and labels of a tar without a manifest
    pixels_digest: str = ""  # of the first bytes of a few images; "": its index is older than this
    subset: ShardRows | None = None  # None: all samples are used

    @property
    def stored_samples(self) -> int:
        """Samples in the tar, used or not."""
        return self.num_samples if self.subset is None else self.subset.stored


@dataclass(frozen=True)
class TableSource:
    """Properties that the shards of one set share."""

    folder: str  # absolute, or a URL
    shown_folder: str | None  # a local folder's name in messages; None: it is a URL
    labels: LabelSpec
    num_shards: int
    portion: Portion | None = None  # None: all of it


@dataclass(frozen=True, eq=False)
class ShardTable(Sequence[ShardEntry]):
    """The shards of one set after another; arrays are [shards], `stamps` [shards, 2]: mtime and ctime in ns.

    Equal to the same entries in a tuple.
    """

    sources: tuple[TableSource, ...]
    rows: PackedShards  # as the manifests list them
    sample_counts: NDArray[np.int64]  # used samples
    held_out: NDArray[np.int64]  # held-out samples; 0 without a portion
    damaged: NDArray[np.bool_]  # did not match the manifest on opening
    stamps: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        source: TableSource,
        rows: PackedShards,
        *,
        damaged: Sequence[int] = (),
        stamps: NDArray[np.int64] | None = None,
    ) -> ShardTable:
        """Make the table of a whole set; `damaged` are numbers of shards."""
        import numpy as np

        if stamps is None:
            stamps = np.broadcast_to(np.int64(_UNKNOWN), (len(rows), 2))
        is_damaged = np.isin(np.arange(len(rows)), np.array(damaged, np.int64))
        return cls((source,), rows, rows.num_samples, np.zeros(len(rows), np.int64), is_damaged, stamps)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, number: int) -> ShardEntry: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[ShardEntry, ...]: ...
    def __getitem__(self, number: int | slice) -> ShardEntry | tuple[ShardEntry, ...]:
        numbers = range(len(self))[number]
        if isinstance(numbers, int):
            return next(self._entries(numbers, numbers + 1))
        return tuple(self[each] for each in numbers)

    def __iter__(self) -> Iterator[ShardEntry]:
        return self._entries(0, len(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def _entries(self, start: int, stop: int) -> Iterator[ShardEntry]:
        first = 0
        for source in self.sources:
            end = first + source.num_shards
            for at in range(max(start, first), min(stop, end), _BLOCK):
                yield from self._of_source(source, slice(at, min(stop, end, at + _BLOCK)), first=first)
            first = end

    def _of_source(self, source: TableSource, part: slice, *, first: int) -> Iterator[ShardEntry]:
        columns = (self.sample_counts, self.held_out, self.damaged, self.stamps)
        columns = zip(self.rows[part], *(column[part].tolist() for column in columns), strict=True)
        for number, (row, count, held_out, damaged, (mtime, ctime)) in enumerate(columns, start=part.start - first):
            if source.shown_folder is None:
                url = join(source.folder, row.file)
                name = redacted(url)
            else:
                url, name = os.path.join(source.folder, row.file), os.path.join(source.shown_folder, row.file)
            portion = source.portion
            yield ShardEntry(
                *(url, name, count, row.num_bytes, row.sha256),
                index=None,
                labels=source.labels,
                state="damaged" if damaged else "whole",
                stamp="" if mtime == _UNKNOWN else f"{mtime} {ctime}",
                subset=portion and ShardRows(number, stored=row.num_samples, held_out=held_out, which=portion.which),
            )

    @property
    def landmarks(self) -> list[str]:
        """The manifest, first and last shard of each local set: files that tell one disk from another."""
        files: list[str] = []
        first = 0
        for source in self.sources:
            if source.shown_folder is not None and source.num_shards:
                ends = self.rows.files[first], self.rows.files[first + source.num_shards - 1]
                files += [os.path.join(source.folder, file) for file in (MANIFEST_FILE, *ends)]
            first += source.num_shards
        return files

    def with_damaged(self, numbers: Sequence[int]) -> ShardTable:
        """Replace which shards are damaged."""
        import numpy as np

        return replace(self, damaged=np.isin(np.arange(len(self)), np.array(numbers, np.int64)))

    def take_portion(self, portion: Portion, *, held_out: Sequence[int]) -> ShardTable:
        """Take one part of the set, given how many samples of each shard are held out."""
        import numpy as np

        assert len(self.sources) == 1, "sets are mixed after their portions were taken"
        counts = np.array(held_out, np.int64)
        return replace(
            self,
            sources=(replace(self.sources[0], portion=portion),),
            sample_counts=counts if portion.which == "held_out" else self.rows.num_samples - counts,
            held_out=counts,
        )

    @staticmethod
    def join(tables: Sequence[ShardTable]) -> ShardTable:
        """Lay tables end to end."""
        import numpy as np

        columns = ("sample_counts", "held_out", "damaged", "stamps")
        return ShardTable(
            tuple(source for table in tables for source in table.sources),
            PackedShards.join([table.rows for table in tables]),
            *(np.concatenate([getattr(table, name) for table in tables]) for name in columns),
        )

"""The shards of opened sets that have a manifest, as columns; a `ShardEntry` is made when somebody asks for one.

Picklable, and its arrays are all that is large in it: 13 MB for 10^5 shards, where entries take 100 MB.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
from numpy.typing import NDArray

from data_shards.shards.labels import LabelSpec
from data_shards.shards.location import join, redacted
from data_shards.shards.manifest import MANIFEST_FILE
from data_shards.shards.packed_shards import PackedShards, in_range
from data_shards.shards.shard_set import ColumnShards, Portion, ShardEntry, ShardRows

_PIECE = 1024  # entries in the making
UNKNOWN = -1  # times of a file that is not there, or not local


@dataclass(frozen=True)
class TableSource:
    """What the shards of one set have in common."""

    folder: str  # absolute, or a URL
    shown_folder: str | None  # what messages call a local folder; None: it is a URL
    labels: LabelSpec  # which member of a sample is its label
    num_shards: int
    portion: Portion | None = None  # the part of it that is used


@dataclass(frozen=True, eq=False)
class ShardTable(ColumnShards):
    """The shards of one set after another; arrays are [shards], `stamps` is [shards, 2]: mtime and ctime in ns."""

    sources: tuple[TableSource, ...]
    rows: PackedShards  # as the manifests list them
    sample_counts: NDArray[np.int64]  # in the parts that are used
    held_out: NDArray[np.int64]  # samples of each shard, where there is a portion; else 0
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
        """A whole set; `damaged` are numbers of shards."""
        is_damaged = np.zeros(len(rows), np.bool_)
        is_damaged[list(damaged)] = True
        if stamps is None:
            stamps = np.broadcast_to(np.int64(UNKNOWN), (len(rows), 2))
        return cls((source,), rows, rows.num_samples, np.zeros(len(rows), np.int64), is_damaged, stamps)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, number: int) -> ShardEntry: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[ShardEntry, ...]: ...
    def __getitem__(self, number: int | slice) -> ShardEntry | tuple[ShardEntry, ...]:
        if isinstance(number, slice):
            return tuple(self[each] for each in range(*number.indices(len(self))))
        number = in_range(number, len(self))
        return next(self._entries(number, number + 1))

    def __iter__(self) -> Iterator[ShardEntry]:
        return self._entries(0, len(self))

    def _entries(self, start: int, stop: int) -> Iterator[ShardEntry]:
        """Read in pieces: a number of an array alone takes as long as fifty in a list."""
        first = 0
        for source in self.sources:
            end = first + source.num_shards
            for at in range(max(start, first), min(stop, end), _PIECE):
                part = slice(at, min(stop, end, at + _PIECE))
                yield from self._of_source(source, part, first=first)
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
                url,
                name,
                count,
                row.num_bytes,
                row.sha256,
                index=None,
                labels=source.labels,
                state="damaged" if damaged else "whole",
                stamp="" if mtime == UNKNOWN else f"{mtime} {ctime}",
                subset=portion and ShardRows(number, stored=row.num_samples, held_out=held_out, which=portion.which),
            )

    @property
    def landmarks(self) -> list[str]:
        """Of each local set its manifest, its first shard and its last: files that tell one disk from another."""
        files: list[str] = []
        first = 0
        for source in self.sources:
            if source.shown_folder is not None and source.num_shards:
                ends = self.rows.files[first], self.rows.files[first + source.num_shards - 1]
                files += [os.path.join(source.folder, file) for file in (MANIFEST_FILE, *ends)]
            first += source.num_shards
        return files

    @property
    def sizes(self) -> list[int]:
        return self.sample_counts.tolist()

    @property
    def num_bytes(self) -> int:
        return int(self.rows.num_bytes.sum())

    @property
    def is_local(self) -> bool:
        return all(source.shown_folder is not None for source in self.sources)

    @property
    def is_multi_label(self) -> bool:
        return any(source.labels.kind == "multi" for source in self.sources)

    @property
    def damaged_numbers(self) -> list[int]:
        return np.flatnonzero(self.damaged).tolist()

    def with_damaged(self, numbers: Sequence[int]) -> ShardTable:
        damaged = np.zeros(len(self), np.bool_)
        damaged[list(numbers)] = True
        return replace(self, damaged=damaged)

    def take_portion(self, portion: Portion, *, held_out: Sequence[int]) -> ShardTable:
        assert len(self.sources) == 1, "sets are mixed after their portions were taken"
        counts = np.array(held_out, np.int64)
        return replace(
            self,
            sources=(replace(self.sources[0], portion=portion),),
            sample_counts=counts if portion.which == "held_out" else self.rows.num_samples - counts,
            held_out=counts,
        )

    def join(self, others: Sequence[ColumnShards]) -> ShardTable:
        tables = [self, *(other for other in others if isinstance(other, ShardTable))]
        assert len(tables) == 1 + len(others), "one kind of columns"
        return ShardTable(
            tuple(source for table in tables for source in table.sources),
            PackedShards.join([table.rows for table in tables]),
            *(
                np.concatenate([getattr(table, name) for table in tables])
                for name in ("sample_counts", "held_out", "damaged", "stamps")
            ),
        )

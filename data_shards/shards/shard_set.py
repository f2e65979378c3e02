"""An opened set of shards: picklable values without open files, 13 MB for 10^5 shards."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.labels import LabelSpec
from shardvit.data_shards.shards.location import is_local, join, redacted
from shardvit.data_shards.shards.manifest import MANIFEST_FILE, Shard
from shardvit.data_shards.shards.row_bitmap import stored_rows
from shardvit.data_shards.shards.shard_index import Texts
from shardvit.data_shards.vocabulary import LabelKind, PartName

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Damaged = Literal["refuse", "report"]
Report = Callable[[str], None]
_Count = TypeVar("_Count", int, "NDArray[np.int64]")

_BLOCK = 1024  # entries converted together: one number from an array takes as long as fifty from a list
_UNKNOWN = -1  # number of bytes


@dataclass(frozen=True)
class Portion:
    """One of the two parts of a set (see `holdout`); `hold_out` is the share held out, 0 to 1."""

    which: PartName
    hold_out: float

    def used(self, stored: _Count, *, held_out: _Count) -> _Count:
        """Count this part's samples in one shard, or in each."""
        return held_out if self.which == "held_out" else stored - held_out

    def describe(self) -> str:
        return f"{'' if self.which == 'held_out' else 'all but '}{100 * self.hold_out:g} % held out"


@dataclass(frozen=True)
class ShardsSpec:
    """The user's description of a set of shards; `label`, `kind` and `classes` are for tars without a manifest.

    `location` is a folder with a manifest.json (local, or a URL), another manifest in it, a folder of tars, or a
    pattern of tars ("s3://bucket/x-{000..127}.tar", "a.tar::b.tar", "pipe:...").
    """

    location: str
    label: str | None = None  # "cls", "txt" or "json:KEY"; None: `cls`, if it exists
    kind: LabelKind = "single"
    classes: Path | None = None  # file with one name a line, a JSON list, or {name: number}; None: found in the labels
    portion: Portion | None = None  # None: all samples
    digest: str = ""  # of the manifest to prefer: if the location's is another, manifest-DIGEST.json beside it counts


@dataclass(frozen=True)
class ShardRows:
    """A tar's samples in its set, or in one part of it; see `holdout.rows_of`."""

    number: int  # of the shard in the whole set
    listed: int  # samples that the manifest counts
    held_out: int  # samples held out
    which: PartName | None  # None: all that are listed
    rows: str  # which of the tar's samples are listed, see `row_bitmap`; "": all


@dataclass(frozen=True)
class TarFacts:
    """Facts from indexing a tar without a manifest; see `ShardEntry`."""

    index: Path | None = None
    index_digest: str = ""
    pixels_digest: str = ""


@dataclass(frozen=True)
class ShardEntry:
    """One tar of a set."""

    url: str  # an absolute local path, a URL that fsspec opens, or "pipe:COMMAND"
    name: str  # for messages; has no credentials
    num_samples: int  # used samples
    num_bytes: int | None  # the tar's size; None: unknown
    sha256: str  # digest of all its bytes; "": unknown
    index: Path | None  # a local index file; None: beside the tar, or built from it
    labels: LabelSpec
    state: Literal["whole", "damaged"] = "whole"  # "damaged": it did not match the manifest on opening
    stamp: str = ""  # times, or the store's ETag, on opening: another one after the file is written; "": unknown
    index_digest: str = ""  # of the keys, image sizes and labels of a tar without a manifest
    pixels_digest: str = ""  # of the first bytes of a few images; "" from an older index
    subset: ShardRows | None = None  # None: all samples are used

    @property
    def stored_samples(self) -> int:
        """Samples in the tar, used or not."""
        if self.subset is None:
            return self.num_samples
        return stored_rows(self.subset.rows) if self.subset.rows else self.subset.listed


@dataclass(frozen=True)
class ShardSource:
    """Properties shared by consecutive shards, from a manifest or from tars without one."""

    folder: str  # absolute, or a URL; "": each shard's file is a location itself
    shown_folder: str  # a local folder's name in messages; "" for others
    labels: LabelSpec
    num_shards: int
    portion: Portion | None = None  # None: all samples
    tars: tuple[TarFacts, ...] = ()  # one for each shard without a manifest
    rows: tuple[str, ...] = ()  # one for each shard, if the manifest counts only some samples of some
    manifest: str = MANIFEST_FILE  # its name
    digest: str = ""  # the manifest's


@dataclass(frozen=True, eq=False)
class ShardTable(Sequence[ShardEntry]):
    """The shards of all sources in order, as columns; arrays are [shards]."""

    sources: tuple[ShardSource, ...]
    files: Texts  # in the source's folder
    num_samples: NDArray[np.int64]  # listed, used or not
    num_bytes: NDArray[np.int64]
    sha256: Texts
    stamps: Texts
    held_out: NDArray[np.int64]  # held-out samples; 0 without a portion
    damaged: NDArray[np.bool_]  # did not match the manifest on opening

    @classmethod
    def of(
        cls, source: ShardSource, shards: Sequence[Shard], *, stamps: Sequence[str] = (), damaged: Sequence[int] = ()
    ) -> ShardTable:
        """Make the table of a whole set; `damaged` lists shard numbers."""
        import numpy as np

        return cls(
            (source,),
            Texts.of(shard.file for shard in shards),
            np.array([shard.num_samples for shard in shards], np.int64),
            np.array([shard.num_bytes for shard in shards], np.int64),
            Texts.of(shard.sha256 for shard in shards),
            Texts.of(stamps or [""] * len(shards)),
            np.zeros(len(shards), np.int64),
            np.isin(np.arange(len(shards)), np.array(damaged, np.int64)),
        )

    @classmethod
    def of_entries(cls, entries: Sequence[ShardEntry]) -> ShardTable:
        """Make the table of tars without a manifest, using all their samples."""
        tars = tuple(TarFacts(each.index, each.index_digest, each.pixels_digest) for each in entries)
        labels = entries[0].labels if entries else LabelSpec()
        assert all(each.subset is None and each.labels == labels for each in entries)
        sizes = (_UNKNOWN if each.num_bytes is None else each.num_bytes for each in entries)
        return cls.of(
            ShardSource("", "", labels, len(entries), tars=tars),
            [Shard(each.url, each.num_samples, size, each.sha256) for each, size in zip(entries, sizes, strict=True)],
            stamps=[each.stamp for each in entries],
            damaged=[number for number, each in enumerate(entries) if each.state == "damaged"],
        )

    def __len__(self) -> int:
        return len(self.files)

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
        for source, first, end in self.spans:
            for at in range(max(start, first), min(stop, end), _BLOCK):
                yield from self._of_source(source, slice(at, min(stop, end, at + _BLOCK)), first=first)

    @property
    def spans(self) -> Iterator[tuple[ShardSource, int, int]]:
        """Each source with the number of its first shard, and of the one after its last."""
        first = 0
        for source in self.sources:
            yield source, first, first + source.num_shards
            first += source.num_shards

    def _of_source(self, source: ShardSource, part: slice, *, first: int) -> Iterator[ShardEntry]:
        texts = (self.files[part], self.sha256[part], self.stamps[part])
        numbers = (self.num_samples, self.num_bytes, self.held_out, self.damaged)
        rows = zip(*texts, *(column[part].tolist() for column in numbers), strict=True)
        portion, is_here = source.portion, is_local(source.folder)
        which = portion and portion.which
        for number, row in enumerate(rows, start=part.start - first):
            file, sha256, stamp, listed, num_bytes, held_out, damaged = row
            url = os.path.join(source.folder, file) if is_here else join(source.folder, file)
            tar = source.tars[number] if source.tars else TarFacts()
            chosen = source.rows[number] if source.rows else ""
            yield ShardEntry(
                url=url,
                name=os.path.join(source.shown_folder, file) if source.shown_folder else redacted(url),
                num_samples=listed if portion is None else portion.used(listed, held_out=held_out),
                num_bytes=None if num_bytes == _UNKNOWN else num_bytes,
                sha256=sha256,
                index=tar.index,
                labels=source.labels,
                state="damaged" if damaged else "whole",
                stamp=stamp,
                index_digest=tar.index_digest,
                pixels_digest=tar.pixels_digest,
                subset=ShardRows(number, listed, held_out, which, chosen) if which or chosen else None,
            )

    @property
    def used_samples(self) -> NDArray[np.int64]:
        """Count each shard's samples in the source's portion."""
        used = self.num_samples.copy()
        for source, first, end in self.spans:
            if source.portion is not None:
                used[first:end] = source.portion.used(used[first:end], held_out=self.held_out[first:end])
        return used

    @property
    def landmarks(self) -> list[str]:
        """Files that tell one disk from another: each local set's manifest (or indexes), first and last shard."""
        files: list[str] = []
        for source, first, end in self.spans:
            ends = {"": [first, end - 1]} if first < end else {}
            if not source.folder:  # for each folder of tars
                ends = {}
                for number in filter(lambda number: is_local(self.files[number]), range(first, end)):
                    ends.setdefault(os.path.dirname(self.files[number]), [number, number])[1] = number
            elif source.shown_folder:
                files.append(os.path.join(source.folder, source.manifest))
            else:
                continue
            for entry in (self[number] for pair in ends.values() for number in pair):
                files += [entry.url, *([str(entry.index)] if entry.index else [])]
        return list(dict.fromkeys(files))

    @staticmethod
    def join(tables: Sequence[ShardTable]) -> ShardTable:
        import numpy as np

        def joined(name: str) -> Any:
            columns = [getattr(table, name) for table in tables]
            return Texts.join(columns) if isinstance(columns[0], Texts) else np.concatenate(columns)

        sources = tuple(source for table in tables for source in table.sources)
        return ShardTable(sources, *(joined(column.name) for column in fields(ShardTable)[1:]))


@dataclass(frozen=True)
class ShardSet:
    """The samples of one split; class number `i` means `classes[i]`.

    `lost_samples` counts those known to be gone; reading finds more. For packed shards `num_samples` still includes
    them; for tars without a manifest it does not, and a damaged one is assumed to have been as large as the rest.
    """

    name: str  # the data set's name
    source: str  # where it was opened, without credentials
    split: str
    classes: tuple[str, ...]
    shards: ShardTable  # sample numbers follow this order
    digest: str  # at most 32 hex digits that change with the content, not with the place
    damage: tuple[str, ...] = ()  # tolerated damage, a sentence each
    lost_samples: int = 0
    channels: int = 0  # as in `Manifest`, with dtype
    dtype: str = ""  # "" also for sets of several types

    @property
    def num_samples(self) -> int:
        return sum(self.shard_sizes)

    @property
    def num_bytes(self) -> int | None:
        """None if any shard's size is unknown."""
        sizes = self.shards.num_bytes
        return None if (sizes == _UNKNOWN).any() else int(sizes.sum())

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def label_map(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.classes)}

    @property
    def is_multi_label(self) -> bool:
        return any(source.labels.kind == "multi" for source in self.shards.sources)

    @property
    def is_local(self) -> bool:
        return all(
            is_local(source.folder) if source.folder else all(map(is_local, self.shards.files[first:end]))
            for source, first, end in self.shards.spans
        )

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        return tuple(self.shards.used_samples.tolist())

    @property
    def damaged_numbers(self) -> list[int]:
        return self.shards.damaged.nonzero()[0].tolist()

    def with_damaged(self, numbers: Sequence[int], *, damage: tuple[str, ...], lost_samples: int) -> ShardSet:
        """Return the set as another host finds it on its own disks."""
        import numpy as np

        shards = replace(self.shards, damaged=np.isin(np.arange(len(self.shards)), np.array(numbers, np.int64)))
        return replace(self, shards=shards, damage=damage, lost_samples=lost_samples)


def merge_shard_sets(sets: Sequence[ShardSet]) -> ShardSet:
    """Concatenate sets (a single one is unchanged); UserError if classes differ or only some are multi-label."""
    first = sets[0]
    if len(sets) == 1:
        return first
    for other in sets[1:]:
        if difference := class_difference(first, other, called=(first.source, other.source)):
            raise UserError(
                f"{first.source} and {other.source} cannot be mixed, their classes differ ({difference}): pack both "
                "from the same list of classes"
            )
        if other.is_multi_label != first.is_multi_label:
            raise UserError(
                f"{first.source} and {other.source} cannot be mixed: in one of them a sample has a list of labels"
            )
        if other.channels != first.channels:
            both = (f"{each.source} has {each.channels or 'three 8-bit'} channels" for each in (first, other))
            raise UserError(f"{' and '.join(both)}: they cannot be mixed; pack both with the same --channels")
    return replace(
        first,
        name=" + ".join(dict.fromkeys(one.name for one in sets)),
        source=" + ".join(one.source for one in sets),
        shards=ShardTable.join([one.shards for one in sets]),
        digest=hashlib.sha256(json.dumps([one.digest for one in sets]).encode()).hexdigest()[:32],
        dtype=first.dtype if len({one.dtype for one in sets}) == 1 else "",
        damage=tuple(damage for one in sets for damage in one.damage),
        lost_samples=sum(one.lost_samples for one in sets),
    )


def class_difference(one: ShardSet, other: ShardSet, *, called: tuple[str, str]) -> str:
    """Describe the first class that differs, or the numbers of classes; "" if they are the same."""
    for number, (name, other_name) in enumerate(zip(one.classes, other.classes, strict=False)):
        if name != other_name:
            return f"class {number} is {name!r} in {called[0]} and {other_name!r} in {called[1]}"
    if one.num_classes == other.num_classes:
        return ""
    return f"{one.num_classes} classes in {called[0]}, {other.num_classes} in {called[1]}"

"""A set of shards once it is open: plain values, which hold no file open and are cheap to import."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from data_shards.errors import UserError
from data_shards.shards.labels import LabelSpec
from data_shards.vocabulary import LabelKind, PartName

Damaged = Literal["refuse", "report"]
Report = Callable[[str], None]


@dataclass(frozen=True)
class Portion:
    """One of the two parts that a set is cut into, see `hold_out`; `hold_out` is the held-out one's share, 0 to 1."""

    which: PartName
    hold_out: float

    def describe(self) -> str:
        return f"{'' if self.which == 'held_out' else 'all but '}{100 * self.hold_out:g} % held out"


@dataclass(frozen=True)
class ShardRows:
    """The samples of a tar that are in one part of its set; see `hold_out.rows_of`."""

    number: int  # of the shard in the whole set
    stored: int  # samples in the tar
    held_out: int  # how many of them are held out
    which: PartName


@dataclass(frozen=True)
class ShardEntry:
    """One tar of a set.

    `state` is "damaged" if the shard did not match the manifest on opening, and that was tolerated. `stamp` (times or
    the store's ETag on opening) changes when the file is written; "": unknown.
    """

    url: str  # an absolute local path, a URL that fsspec opens, or "pipe:COMMAND"
    name: str  # what messages call it; never has credentials in it
    num_samples: int  # samples in it, or in the part of it that is used
    num_bytes: int | None  # the tar's size; None where it is unknown
    sha256: str  # the digest of all its bytes; "" where it is unknown
    index: Path | None  # a local index file; None: beside the tar, or built from it
    labels: LabelSpec  # which member of a sample is its label
    state: Literal["whole", "damaged"] = "whole"
    stamp: str = ""
    index_digest: str = ""  # of the keys, image sizes and labels of a tar without a manifest
    pixels_digest: str = ""  # of the first bytes of a few of its images; "" where its index is older than this
    subset: ShardRows | None = None  # None: all samples are used

    @property
    def stored_samples(self) -> int:
        """Samples in the tar, used or not."""
        return self.num_samples if self.subset is None else self.subset.stored


class ColumnShards(Sequence[ShardEntry], ABC):
    """The shards of a set as columns (see `shard_table`); equal to the same entries in a tuple."""

    @property
    @abstractmethod
    def sizes(self) -> list[int]:
        """Samples of each, in the part of it that is used."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Of all of them together."""

    @property
    @abstractmethod
    def is_local(self) -> bool:
        """Whether all are local files."""

    @property
    @abstractmethod
    def is_multi_label(self) -> bool: ...

    @property
    @abstractmethod
    def damaged_numbers(self) -> list[int]:
        """Of the shards that are damaged."""

    @abstractmethod
    def with_damaged(self, numbers: Sequence[int]) -> ColumnShards:
        """The same, except for which ones are damaged."""

    @abstractmethod
    def take_portion(self, portion: Portion, *, held_out: Sequence[int]) -> ColumnShards:
        """The samples in one part of a set, given how many of each shard are held out."""

    @abstractmethod
    def join(self, others: Sequence[ColumnShards]) -> ColumnShards:
        """These and others of the same class, end to end."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True)
class ShardSet:
    """The samples of one split; class number `i` means `classes[i]`.

    `lost_samples` are those known to be gone; reading finds the others. Packed shards still count them in
    `num_samples`; tars without a manifest do not, and a damaged one is assumed to have been as large as the rest.
    """

    name: str  # what the data set is called
    source: str  # where it was opened, fit to be shown
    split: str  # "train", "val",
    classes: tuple[str, ...]  # names of the classes
    shards: Sequence[ShardEntry]  # the tars, in the order that sample numbers follow; of a packed set `ColumnShards`
    digest: str  # at most 32 hex digits that change with the content, not with the place
    damage: tuple[str, ...] = ()  # what is wrong with it and was tolerated, a sentence each
    lost_samples: int = 0

    @property
    def num_samples(self) -> int:
        return sum(self.shard_sizes)

    @property
    def num_bytes(self) -> int | None:
        """None if the size of one shard is unknown."""
        if isinstance(self.shards, ColumnShards):
            return self.shards.num_bytes
        sizes = [shard.num_bytes for shard in self.shards]
        return None if None in sizes else sum(size or 0 for size in sizes)

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def label_map(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.classes)}

    @property
    def is_multi_label(self) -> bool:
        """Whether a sample may have any number of classes, rather than exactly one."""
        if isinstance(self.shards, ColumnShards):
            return self.shards.is_multi_label
        return any(shard.labels.kind == "multi" for shard in self.shards)

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        if isinstance(self.shards, ColumnShards):
            return tuple(self.shards.sizes)
        return tuple(shard.num_samples for shard in self.shards)

    @property
    def damaged_numbers(self) -> list[int]:
        """The shards that were damaged on opening."""
        if isinstance(self.shards, ColumnShards):
            return self.shards.damaged_numbers
        return [number for number, shard in enumerate(self.shards) if shard.state == "damaged"]

    def with_damaged(self, numbers: Sequence[int], *, damage: tuple[str, ...], lost_samples: int) -> ShardSet:
        """The set as another host has it on its own disks."""
        if isinstance(self.shards, ColumnShards):
            shards = self.shards.with_damaged(numbers)
        else:
            damaged, entries = set(numbers), enumerate(self.shards)
            shards = tuple(replace(each, state="damaged" if at in damaged else "whole") for at, each in entries)
        return replace(self, shards=shards, damage=damage, lost_samples=lost_samples)


@dataclass(frozen=True)
class ShardsSpec:
    """What the user says about a set of shards; `label`, `kind` and `classes` are for tars without a manifest.

    Args:
        location: a folder with a manifest.json (local, or a URL), a folder of tars, or a pattern of tars
            ("s3://bucket/x-{000..127}.tar", "a.tar::b.tar", "pipe:...").
        label: "cls", "txt" or "json:KEY"; None: `cls`, if it exists.
        kind: one class for each sample, or a list.
        classes: a file with a name a line, a JSON list, or {name: number}; None: they are found in the labels.
        portion: the part of it to use; None: all.
    """

    location: str
    label: str | None = None
    kind: LabelKind = "single"
    classes: Path | None = None
    portion: Portion | None = None


def merge_shard_sets(sets: Sequence[ShardSet]) -> ShardSet:
    """Several sets laid end to end, one alone unchanged; UserError if classes differ or one is multi-label."""
    first = sets[0]
    if len(sets) == 1:
        return first
    for other in sets[1:]:
        if other.classes != first.classes:
            difference = class_difference(first, other, called=(first.source, other.source))
            raise UserError(
                f"{first.source} and {other.source} cannot be mixed, their classes differ ({difference}): pack both "
                "from the same list of classes"
            )
        if other.is_multi_label != first.is_multi_label:
            raise UserError(
                f"{first.source} and {other.source} cannot be mixed: in one of them a sample has a list of labels"
            )
    return replace(
        first,
        name=" + ".join(dict.fromkeys(one.name for one in sets)),
        source=" + ".join(one.source for one in sets),
        shards=_end_to_end([one.shards for one in sets]),
        digest=hashlib.sha256(json.dumps([one.digest for one in sets]).encode()).hexdigest()[:32],
        damage=tuple(damage for one in sets for damage in one.damage),
        lost_samples=sum(one.lost_samples for one in sets),
    )


def _end_to_end(parts: Sequence[Sequence[ShardEntry]]) -> Sequence[ShardEntry]:
    columns = [part for part in parts if isinstance(part, ColumnShards)]
    if len(columns) == len(parts):
        return columns[0].join(columns[1:])
    return tuple(shard for part in parts for shard in part)


def class_difference(one: ShardSet, other: ShardSet, *, called: tuple[str, str]) -> str:
    """Where their classes first differ, or how many they have; "" if they do not differ."""
    for number, (name, other_name) in enumerate(zip(one.classes, other.classes, strict=False)):
        if name != other_name:
            return f"class {number} is {name!r} in {called[0]} and {other_name!r} in {called[1]}"
    if one.num_classes == other.num_classes:
        return ""
    return f"{one.num_classes} classes in {called[0]}, {other.num_classes} in {called[1]}"

"""A set of shards once it is open: plain values that hold no file open."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from data_shards.errors import UserError
from data_shards.shards.location import is_local
from data_shards.shards.shard_table import Portion, ShardEntry, ShardTable
from data_shards.vocabulary import LabelKind

Damaged = Literal["refuse", "report"]
Report = Callable[[str], None]


@dataclass(frozen=True)
class ShardSet:
    """The samples of one split; class number `i` means `classes[i]`.

    `lost_samples` are those known to be gone; reading finds the others. Packed shards still count them in
    `num_samples`; tars without a manifest do not, and a damaged one is assumed to have been as large as the rest.
    """

    name: str  # the data set's name
    source: str  # where it was opened, without credentials
    split: str
    classes: tuple[str, ...]
    shards: Sequence[ShardEntry]  # in the order that sample numbers follow; a `ShardTable` for packed sets
    digest: str  # at most 32 hex digits that change with the content, not with the place
    damage: tuple[str, ...] = ()  # what was tolerated, a sentence each
    lost_samples: int = 0

    @property
    def num_samples(self) -> int:
        return sum(self.shard_sizes)

    @property
    def num_bytes(self) -> int | None:
        """None if the size of one shard is unknown."""
        if isinstance(self.shards, ShardTable):
            return int(self.shards.rows.num_bytes.sum())
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
        """True if a sample may have any number of classes, rather than exactly one."""
        each = self.shards.sources if isinstance(self.shards, ShardTable) else self.shards
        return any(one.labels.kind == "multi" for one in each)

    @property
    def is_local(self) -> bool:
        """True if all shards are local files."""
        if isinstance(self.shards, ShardTable):
            return all(source.shown_folder is not None for source in self.shards.sources)
        return all(is_local(shard.url) for shard in self.shards)

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        if isinstance(self.shards, ShardTable):
            return tuple(self.shards.sample_counts.tolist())
        return tuple(shard.num_samples for shard in self.shards)

    @property
    def damaged_numbers(self) -> list[int]:
        """The shards that were damaged on opening."""
        if isinstance(self.shards, ShardTable):
            return self.shards.damaged.nonzero()[0].tolist()
        return [number for number, shard in enumerate(self.shards) if shard.state == "damaged"]

    def with_damaged(self, numbers: Sequence[int], *, damage: tuple[str, ...], lost_samples: int) -> ShardSet:
        """The set as another host has it on its own disks."""
        if isinstance(self.shards, ShardTable):
            shards = self.shards.with_damaged(numbers)
        else:
            entries = enumerate(self.shards)
            shards = tuple(replace(each, state="damaged" if at in set(numbers) else "whole") for at, each in entries)
        return replace(self, shards=shards, damage=damage, lost_samples=lost_samples)


@dataclass(frozen=True)
class ShardsSpec:
    """The user's description of a set of shards; `label`, `kind` and `classes` are for tars without a manifest.

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
    """Lay several sets end to end, one alone unchanged; UserError if classes differ or one is multi-label."""
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
    tables = [one.shards for one in sets if isinstance(one.shards, ShardTable)]
    return replace(
        first,
        name=" + ".join(dict.fromkeys(one.name for one in sets)),
        source=" + ".join(one.source for one in sets),
        shards=ShardTable.join(tables)
        if len(tables) == len(sets)
        else tuple(shard for one in sets for shard in one.shards),
        digest=hashlib.sha256(json.dumps([one.digest for one in sets]).encode()).hexdigest()[:32],
        damage=tuple(damage for one in sets for damage in one.damage),
        lost_samples=sum(one.lost_samples for one in sets),
    )


def class_difference(one: ShardSet, other: ShardSet, *, called: tuple[str, str]) -> str:
    """Name the first class that differs, or the numbers of classes; "" if they are the same."""
    for number, (name, other_name) in enumerate(zip(one.classes, other.classes, strict=False)):
        if name != other_name:
            return f"class {number} is {name!r} in {called[0]} and {other_name!r} in {called[1]}"
    if one.num_classes == other.num_classes:
        return ""
    return f"{one.num_classes} classes in {called[0]}, {other.num_classes} in {called[1]}"

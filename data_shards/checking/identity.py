"""What a set of shards was when a stage began, and what of it is another now. Arithmetic alone: nothing is read here.

A set is known by a column for each property. What decides is the content: sizes, numbers of samples, digests, and the
samples that were looked at (see `spots`). Stamps (times, ETags) decide nothing by themselves: a copy has others. Where
one differs, `suspects` names the shard, and its content is looked at. Names of files decide where nothing else does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import PurePath
from typing import Any

from data_shards.shard_set import ShardSet

_MOST_NAMED = 3  # shards in a message
_FREE = ("names", "stamps", "pixels")  # columns that a copy may have otherwise, or that came later


@dataclass(frozen=True)
class SetIdentity:
    """A set of shards; every column has an entry for each shard, "" or None where something is unknown.

    Args:
        digest: of the set as a whole (the manifest's own, with the classes).
        names: of the shards, as messages show them.
        num_bytes: sizes of the tars.
        num_samples: samples in them.
        sha256: of all bytes, as the manifest states it.
        indexes: digest of keys, image sizes and labels, of a tar without a manifest.
        pixels: digest of the first bytes of a few images, of a tar without a manifest.
        stamps: change when the file is written: see `ShardEntry.stamp`.
        spots: number of a shard -> digest of each sample in it that was looked at, "" for one that cannot be read.
    """

    digest: str
    names: tuple[str, ...]
    num_bytes: tuple[int | None, ...]
    num_samples: tuple[int, ...]
    sha256: tuple[str, ...]
    indexes: tuple[str, ...]
    pixels: tuple[str, ...]
    stamps: tuple[str, ...]
    spots: Mapping[int, tuple[str, ...]]

    @classmethod
    def of(cls, shards: ShardSet, *, spots: Mapping[int, Sequence[str]]) -> SetIdentity:
        """Of a set that is open now."""
        entries = shards.shards
        return cls(
            digest=shards.digest,
            names=tuple(entry.name for entry in entries),
            num_bytes=tuple(entry.num_bytes for entry in entries),
            num_samples=tuple(entry.num_samples for entry in entries),
            sha256=tuple(entry.sha256 for entry in entries),
            indexes=tuple(entry.index_digest for entry in entries),
            pixels=tuple(entry.pixels_digest for entry in entries),
            stamps=tuple(entry.stamp for entry in entries),
            spots={shard: tuple(digests) for shard, digests in spots.items()},
        )

    @classmethod
    def from_json(cls, content: Any) -> SetIdentity:
        """From what `json` makes of `vars`.

        Raises:
            ValueError: it is something else.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(content, dict) or set(content) != names:
            raise ValueError("not the columns of a set of shards")
        columns = {key: value for key, value in content.items() if key not in ("digest", "spots")}
        kinds = {"num_bytes": int | None, "num_samples": int}
        for key, column in columns.items():
            kind = kinds.get(key, str)
            if not isinstance(column, list) or not all(isinstance(one, kind) for one in column):
                raise ValueError(f"the column {key} holds something else")
        spots = content["spots"]
        whole = isinstance(spots, dict) and all(
            number.isdecimal() and isinstance(row, list) and all(isinstance(one, str) for one in row)
            for number, row in spots.items()
        )
        if not whole or not isinstance(content["digest"], str) or len({len(one) for one in columns.values()}) != 1:
            raise ValueError("its columns do not fit together")
        return cls(
            digest=content["digest"],
            spots={int(number): tuple(row) for number, row in spots.items()},
            **{key: tuple(column) for key, column in columns.items()},
        )

    @property
    def content_digest(self) -> str:
        """32 hex digits of all that decides."""
        content = {key: value for key, value in vars(self).items() if key not in _FREE}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]

    def seen_as(self, other: SetIdentity, *, unseen: Sequence[int] = ()) -> SetIdentity:
        """The same set with the names and stamps of `other`, but for the shards `unseen`, which keep their stamps."""
        stamps = list(other.stamps)
        for shard in unseen:
            stamps[shard] = self.stamps[shard]
        pixels = tuple(old or new for old, new in zip(self.pixels, other.pixels, strict=True))
        return replace(self, names=other.names, stamps=tuple(stamps), pixels=pixels)


def suspects(before: SetIdentity, now: SetIdentity) -> list[int]:
    """The shards whose file was written, copied or touched since, as far as stamps are known."""
    pairs = zip(before.stamps, now.stamps, strict=True)
    return [shard for shard, (old, new) in enumerate(pairs) if old and new and old != new]


def differences(before: SetIdentity, now: SetIdentity) -> list[str]:
    """What of the content is another, in a few phrases that name shards; empty if nothing is."""
    count, old_count = len(now.names), len(before.names)
    old, new = _contents(before), _contents(now)
    if old != new and sorted(old) == sorted(new):
        shard = next(shard for shard in range(count) if old[shard] != new[shard])
        return [f"its shards are in another order ({now.names[shard]} stands where another one stood)"]
    if count != old_count:
        gone, added = set(old) - set(new), set(new) - set(old)
        examples = [f"{name} is gone" for name, one in zip(before.names, old, strict=True) if one in gone][:1]
        examples += [f"{name} is new" for name, one in zip(now.names, new, strict=True) if one in added][:1]
        return [f"it has {count:,} shards, not {old_count:,}" + "".join(f"; {one}" for one in examples)]
    found = [(shard, phrase) for shard in range(count) if (phrase := _shard_difference(before, now, shard))]
    if found:
        phrases = [f"{now.names[shard]} {phrase}" for shard, phrase in found[:_MOST_NAMED]]
        left = len(found) - len(phrases)
        return phrases + ([f"{left:,} more shards differ"] if left else [])
    if before.digest != now.digest:
        return ["its classes are others, or where its labels stand"]
    return []


def _shard_difference(before: SetIdentity, now: SetIdentity, shard: int) -> str:
    if (old := before.num_samples[shard]) != (new := now.num_samples[shard]):
        return f"holds {new:,} samples, not {old:,}"
    if None not in (sizes := (before.num_bytes[shard], now.num_bytes[shard])) and sizes[0] != sizes[1]:
        return f"has {sizes[1]:,} bytes, not {sizes[0]:,}"
    if _differ(before.sha256[shard], now.sha256[shard]):
        return "has other bytes, by the manifest's SHA-256"
    if _differ(before.indexes[shard], now.indexes[shard]):
        return "has other samples, or in another order: keys, image sizes or labels differ"
    if _differ(before.pixels[shard], now.pixels[shard]):
        return "has other images"
    old_spots, new_spots = before.spots.get(shard), now.spots.get(shard)
    if old_spots and new_spots and (len(old_spots) != len(new_spots) or any(map(_differ, old_spots, new_spots))):
        changed = sum(map(_differ, old_spots, new_spots))
        return f"has other samples: {changed:,} of the {len(new_spots):,} that were compared"
    nothing_else = not (before.sha256[shard] or before.indexes[shard])
    if nothing_else and PurePath(before.names[shard]).name != PurePath(now.names[shard]).name:
        return f"stands where {PurePath(before.names[shard]).name} stood"
    return ""


def _differ(old: str, new: str) -> bool:
    return bool(old and new) and old != new


def _contents(one: SetIdentity) -> list[tuple[str, ...]]:
    """What each shard is known by, wherever it stands."""
    known = zip(one.sha256, one.indexes, one.names, strict=True)
    sizes = zip(one.num_bytes, one.num_samples, strict=True)
    return [
        (sha256, index, "" if sha256 or index else PurePath(name).name, str(num_bytes), str(num_samples))
        for (sha256, index, name), (num_bytes, num_samples) in zip(known, sizes, strict=True)
    ]

"""Identify a set of shards when a stage begins, and tell how it differs later.

Content decides: sizes, sample counts, digests, and the samples read (`spots`); file names only where nothing else is
known. Changed stamps (times, ETags) prove nothing, since copies have others: `compare_suspects` reads such shards.

`identify` reads 2,048 samples from at most 64 shards, always the same ones, up to 128 MiB: 0.1 to 0.3 s from a warm
disk, a few seconds from a cold one. It notices k exchanged images of N with probability 1-(1-2048/N)^k: 0.91 for k =
1,500 of N = 1,281,167. The inode's change time, which cannot be set back, is checked first: if it differs, all bytes
are compared. Remote shards are not read: packed ones are verified by digest on download, others by ETag or, if that
differs, by their new index.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import PurePath
from types import UnionType
from typing import Any

from shardvit.data_shards.errors import CorruptSample, UserError
from shardvit.data_shards.processes import num_cores
from shardvit.data_shards.reading.shard_reader import ShardReader
from shardvit.data_shards.reading.tar_summary import pixels_digest, spread
from shardvit.data_shards.shards.location import is_local, local_path
from shardvit.data_shards.shards.shard_index import load_index
from shardvit.data_shards.shards.shard_set import ShardEntry, ShardSet

MOST_SHARDS = 64
MOST_SAMPLES = 2048
_MOST_BYTES = 128 << 20  # of all samples together
# Suspects are read up to this size, whole if the manifest has their digest: a second or two of SHA-256.
MOST_SUSPECT_BYTES = 1 << 30
_THREADS = 16  # they wait for the disk, or for SHA-256, which releases the GIL
_PIXELS_BYTES = 1 << 20  # read by `pixels_digest` per tar
_MOST_NAMED = 3  # shards in a message
_COLUMNS: dict[str, tuple[str, type | UnionType]] = {  # column: (field of ShardEntry, type)
    "names": ("name", str),
    "num_bytes": ("num_bytes", int | None),
    "num_samples": ("num_samples", int),
    "sha256": ("sha256", str),
    "indexes": ("index_digest", str),
    "pixels": ("pixels_digest", str),
    "stamps": ("stamp", str),
}
_FREE = ("names", "stamps", "pixels")  # columns that differ in copies, or were added later


@dataclass(frozen=True)
class SetIdentity:
    """A set of shards; every column has an entry per shard, "" or None if unknown."""

    digest: str  # of the whole set (the manifest's, with the classes)
    names: tuple[str, ...]  # as messages show them
    num_bytes: tuple[int | None, ...]  # of the tars
    num_samples: tuple[int, ...]
    sha256: tuple[str, ...]  # of all bytes, by the manifest
    indexes: tuple[str, ...]  # digest of keys, image sizes and labels; for a tar without a manifest
    pixels: tuple[str, ...]  # digest of the first bytes of a few images; for a tar without a manifest
    stamps: tuple[str, ...]  # see `ShardEntry.stamp`
    spots: Mapping[int, tuple[str, ...]]  # shard -> digests of the samples read, "" for damaged ones

    @classmethod
    def of(cls, shards: ShardSet, *, spots: Mapping[int, Sequence[str]]) -> SetIdentity:
        pick = attrgetter(*(theirs for theirs, _ in _COLUMNS.values()))
        rows = list(map(pick, shards.shards))  # one pass: entries may be made on access
        columns = {name: tuple(row[at] for row in rows) for at, name in enumerate(_COLUMNS)}
        return cls(shards.digest, spots={shard: tuple(digests) for shard, digests in spots.items()}, **columns)

    @classmethod
    def from_json(cls, content: Any) -> SetIdentity:
        """Load the JSON of `vars` (pydantic refuses names that are not UTF-8); ValueError if it is malformed."""
        if not isinstance(content, dict) or set(content) != {"digest", "spots", *_COLUMNS}:
            raise ValueError("not the columns of a set of shards")
        digest, spots = content["digest"], content["spots"]
        good = isinstance(digest, str) and isinstance(spots, dict) and all(map(str.isdecimal, spots))
        good = good and all(_is_list(content[name], of=kind) for name, (_, kind) in _COLUMNS.items())
        good = good and all(_is_list(row, of=str) for row in spots.values())
        if not good or len({len(content[name]) for name in _COLUMNS}) != 1:
            raise ValueError("the columns of a set of shards hold something else")
        spots = {int(number): tuple(row) for number, row in spots.items()}
        return cls(digest=digest, spots=spots, **{name: tuple(content[name]) for name in _COLUMNS})

    @property
    def content_digest(self) -> str:
        """Hash everything that decides, as 32 hex digits."""
        content = {key: value for key, value in vars(self).items() if key not in _FREE}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]

    def seen_as(self, other: SetIdentity, *, unseen: Sequence[int] = ()) -> SetIdentity:
        """Take names and stamps from `other`, except the stamps of shards in `unseen`."""
        pairs = enumerate(zip(self.stamps, other.stamps, strict=True))
        stamps = [old if shard in unseen else new for shard, (old, new) in pairs]
        pixels = tuple(old or new for old, new in zip(self.pixels, other.pixels, strict=True))
        return replace(self, names=other.names, stamps=tuple(stamps), pixels=pixels)


def _is_list(column: Any, *, of: type | UnionType) -> bool:
    return isinstance(column, list) and all(isinstance(one, of) for one in column)


def suspects(before: SetIdentity, now: SetIdentity) -> list[int]:
    """List shards whose stamp changed: written, copied or touched since."""
    pairs = zip(before.stamps, now.stamps, strict=True)
    return [shard for shard, (old, new) in enumerate(pairs) if old and new and old != new]


def differences(before: SetIdentity, now: SetIdentity) -> list[str]:
    """Describe differences in content, as phrases that name shards."""
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
        return ["its classes differ, or where its labels are"]
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
    old_spots, new_spots = before.spots.get(shard, ()), now.spots.get(shard, ())
    changed = sum(map(_differ, old_spots, new_spots))
    if changed or (old_spots and new_spots and len(old_spots) != len(new_spots)):
        return f"has other samples: {changed:,} of the {len(new_spots):,} that were compared"
    nothing_else = not (before.sha256[shard] or before.indexes[shard])
    if nothing_else and PurePath(before.names[shard]).name != PurePath(now.names[shard]).name:
        return f"stands where {PurePath(before.names[shard]).name} stood"
    return ""


def _differ(old: str, new: str) -> bool:
    return bool(old and new) and old != new


def _contents(one: SetIdentity) -> list[tuple[str, ...]]:
    columns = zip(one.sha256, one.indexes, one.names, one.num_bytes, one.num_samples, strict=True)
    return [
        (sha256, index, "" if sha256 or index else PurePath(name).name, str(num_bytes), str(num_samples))
        for sha256, index, name, num_bytes, num_samples in columns
    ]


def identify(shards: ShardSet) -> SetIdentity:
    """Identify a set by reading a few samples; UserError if a shard cannot be read or its index does not match."""
    numbers = [number for number in spread(len(shards.shards), most=MOST_SHARDS) if is_local(shards.shards[number].url)]
    share = max(1, min(len(shards.shards), MOST_SHARDS))
    rows, most_bytes = MOST_SAMPLES // share, _MOST_BYTES // share
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda number: _look(shards, number, rows=rows, most_bytes=most_bytes), numbers))
    return SetIdentity.of(shards, spots=dict(zip(numbers, found, strict=True)))


def compare_suspects(shards: ShardSet, before: SetIdentity, suspects: Sequence[int]) -> dict[int, bool]:
    """Read shards with a changed stamp, up to `MOST_SUSPECT_BYTES`; map each to whether its content is unchanged.

    Compares all bytes if the manifest has their digest, else 16 images of a tar whose index was already compared.
    Shards not read (too many, or remote) are missing from the result.
    """
    chosen: list[int] = []
    left_bytes = MOST_SUSPECT_BYTES
    for shard in suspects:
        entry = shards.shards[shard]
        cost = (entry.num_bytes or 0) if entry.sha256 else _PIXELS_BYTES
        if is_local(entry.url) and (cost <= left_bytes or not chosen):
            chosen.append(shard)
            left_bytes -= cost
    with ThreadPoolExecutor(max(2, min(_THREADS, num_cores()))) as pool:
        alike = dict(zip(chosen, pool.map(lambda shard: _is_alike(shards, before, shard), chosen), strict=True))
    for shard in suspects:
        entry = shards.shards[shard]
        if not is_local(entry.url) and entry.pixels_digest and before.pixels[shard]:
            alike[shard] = True  # reindexed, and `differences` has compared the result
    return alike


def _is_alike(shards: ShardSet, before: SetIdentity, shard: int) -> bool:
    entry = shards.shards[shard]
    if entry.state == "damaged":
        return True  # reported when the set was opened, and counted against max_corrupt_share
    if before.sha256[shard]:
        return _sha256(entry) == before.sha256[shard]
    if before.pixels[shard] and entry.index is not None:
        return pixels_digest(str(local_path(entry.url)), load_index(entry.index)) == before.pixels[shard]
    return True  # all that is known was compared already


def _sha256(entry: ShardEntry) -> str:
    try:
        with open(local_path(entry.url), "rb", buffering=0) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{entry.name}: cannot be read ({error.strerror})") from None


def _look(shards: ShardSet, number: int, *, rows: int, most_bytes: int) -> list[str]:
    entry = shards.shards[number]
    reader = ShardReader(shards)
    digests: list[str] = []
    done_bytes = 0
    try:
        for row in spread(entry.num_samples, most=rows):
            if done_bytes > most_bytes:
                break
            try:
                sample = reader.read(number, row=row)
            except CorruptSample:
                digests.append("")
                continue
            head = f"{sample.key!r} {sample.labels} ".encode("utf-8", "surrogateescape")
            digests.append(hashlib.blake2b(head + sample.image, digest_size=8).hexdigest())
            done_bytes += len(sample.image)
    finally:
        reader.close()
    return digests

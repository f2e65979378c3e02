"""Split a set of shards into a held-out part and the rest, by a pure function shared by all runs.

Samples are hashed with a fixed seed, whatever their class. Of N samples round(share * N) are held out, at least one and
not all. Each shard gives its share rounded up or down (systematic sampling over the shards in random order), so that
each sample has the same chance, also in shards of one image. Costs a second for 10^5 shards, then 0.5 µs a sample when
a shard is opened. Both parts read every shard, so both fetch all remote ones.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.order.randomness import hash_words, permute
from shardvit.data_shards.shards.row_bitmap import unpack_rows
from shardvit.data_shards.shards.shard_set import Portion, ShardEntry, ShardRows, ShardSet
from shardvit.data_shards.vocabulary import RandomStream

if TYPE_CHECKING:
    from shardvit.data_shards.shards.shard_index import ShardIndex

_SEED = 0  # not the recipe's: every run holds out the same samples


def held_out_images(num_samples: int, *, share: float) -> int:
    """Count the held-out samples of a set; UserError for fewer than two samples."""
    if num_samples < 2:
        raise UserError(f"a set of {num_samples} images cannot be cut into a held-out part and the rest: pack more")
    return min(max(1, int(share * num_samples + 0.5)), num_samples - 1)


def take_portion(shards: ShardSet, portion: Portion) -> ShardSet:
    """Take the samples of one part; all shards stay, with fewer samples. UserError for fewer than two samples."""
    sizes = shards.shard_sizes
    counts = _held_out_of_shards(sizes, total=held_out_images(shards.num_samples, share=portion.hold_out))
    (source,) = shards.shards.sources  # sets are mixed after taking their portions
    sources = (replace(source, portion=portion),)
    table = replace(shards.shards, sources=sources, held_out=np.array(counts, np.int64))
    kept = int(table.used_samples.sum())
    content = json.dumps([shards.digest, portion.which, portion.hold_out])
    return replace(
        shards,
        name=f"{shards.name} ({portion.describe()})",
        shards=table,
        digest=hashlib.sha256(content.encode()).hexdigest()[:32],
        lost_samples=-(-shards.lost_samples * kept // shards.num_samples),  # the part's share of them
    )


def rows_of(subset: ShardRows) -> NDArray[np.int64]:
    """List a tar's rows that are in the set, or in its part, ascending: int64 [samples in it]."""
    every = np.arange(subset.listed, dtype=np.int64)
    listed = np.flatnonzero(unpack_rows(subset.rows)) if subset.rows else every
    if subset.listed == 0 or subset.which is None:
        return listed
    key = hash_words(RandomStream.HOLD_OUT, _SEED, subset.number)
    is_held_out = permute(every, size=subset.listed, key=key) < subset.held_out
    return listed[is_held_out if subset.which == "held_out" else ~is_held_out]


def index_of(subset: ShardRows | None, index: ShardIndex) -> ShardIndex:
    """Keep the set's samples of a shard's index, except those lost at the end of a damaged shard."""
    if subset is None:
        return index
    rows = rows_of(subset)
    return index.take(rows[rows < len(index)].tolist())


def shared_images(one: ShardSet, other: ShardSet) -> int:
    """Count images of `one` that are also in `other`, by tars at one place or of the same bytes (10 µs a shard)."""
    known = {mark: entry for entry in one.shards for mark in (entry.url, entry.sha256) if mark}
    shared: dict[str, int] = {}
    for entry in other.shards:
        if own := known.get(entry.url) or known.get(entry.sha256):
            one_part, other_part = own.subset, entry.subset
            if one_part and other_part and _drawn(one_part) != _drawn(other_part):
                rows = len(np.intersect1d(rows_of(one_part), rows_of(other_part), assume_unique=True))
            else:
                (start, end), (other_start, other_end) = _span(own), _span(entry)
                rows = max(0, min(end, other_end) - max(start, other_start))
            shared[own.url] = max(shared.get(own.url, 0), rows)
    return sum(shared.values())


def _span(entry: ShardEntry) -> tuple[int, int]:
    """Return the part's range of a shard's rows, as if the held-out ones came first (see `rows_of`)."""
    if (part := entry.subset) is None:
        return 0, entry.num_samples
    return (0, part.held_out) if part.which == "held_out" else (part.held_out, part.listed)


def _drawn(part: ShardRows) -> tuple[int, int, str]:
    """Return what decides the order in which a shard's rows are held out."""
    return part.number, part.listed, part.rows


def _held_out_of_shards(sizes: tuple[int, ...], *, total: int) -> list[int]:
    """Spread `total` held-out samples over the shards in random order, from a random start."""
    num_samples = sum(sizes)
    drawn = hash_words(RandomStream.HOLD_OUT_SHARDS, _SEED, np.arange(len(sizes), dtype=np.uint64))
    done = int(hash_words(RandomStream.HOLD_OUT_SHARDS, _SEED, len(sizes))[0]) % num_samples
    counts = [0] * len(sizes)
    for number in np.argsort(drawn, kind="stable").tolist():  # Python's integers: total * num_samples is large
        before, done = done, done + total * sizes[number]
        counts[number] = done // num_samples - before // num_samples
    return counts

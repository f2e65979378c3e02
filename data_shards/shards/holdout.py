"""A set of shards in two parts, one held out and the rest: which samples are in which, as a pure function.

Each sample is in exactly one of the two parts, which `order.sample_order`, the readers and the digests see as sets of
their own. Chosen by hash, so that neither classes nor their order in the shards matter, and with a fixed seed, so
that every run on the same shards holds out the same samples. Of N samples round(share * N) are held out, at least one
and not all; a shard's number is its share rounded up or down (systematic sampling over the shards in random order),
so that each sample has the same chance, in shards of one image too.

Cost: a second when a set of 10^5 shards is opened, of any number of samples; half a microsecond a sample when a shard
is, whose index then has the part's samples alone. Every shard of the set is read for the held-out part, too: shards
that are not local are fetched for it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from data_shards.errors import UserError
from data_shards.order.randomness import hash_words, permute
from data_shards.shards.shard_set import ColumnShards, Portion, ShardEntry, ShardRows, ShardSet
from data_shards.vocabulary import RandomStream

if TYPE_CHECKING:
    from data_shards.shards.shard_index import ShardIndex

_SEED = 0  # of all sets alike: the held-out samples do not depend on the recipe's seed


def held_out_images(num_samples: int, *, share: float) -> int:
    """How many of a set's samples are held out; UserError for a set of less than two."""
    if num_samples < 2:
        raise UserError(f"a set of {num_samples} images cannot be cut into a held-out part and the rest: pack more")
    return min(max(1, int(share * num_samples + 0.5)), num_samples - 1)


def take_portion(shards: ShardSet, portion: Portion) -> ShardSet:
    """The samples of a set that are in one part; the shards stay, and hold fewer. UserError if there are none."""
    sizes = shards.shard_sizes
    counts = _held_out_of_shards(sizes, total=held_out_images(shards.num_samples, share=portion.hold_out))
    held_out_counts = portion.which == "held_out"
    if isinstance(shards.shards, ColumnShards):
        entries = shards.shards.take_portion(portion, held_out=counts)
    else:
        entries = tuple(
            replace(
                entry,
                num_samples=count if held_out_counts else size - count,
                subset=ShardRows(number, stored=size, held_out=count, which=portion.which),
            )
            for number, (entry, size, count) in enumerate(zip(shards.shards, sizes, counts, strict=True))
        )
    kept = sum(counts) if held_out_counts else sum(sizes) - sum(counts)
    content = json.dumps([shards.digest, portion.which, portion.hold_out])
    return replace(
        shards,
        name=f"{shards.name} ({portion.describe()})",
        shards=entries,
        digest=hashlib.sha256(content.encode()).hexdigest()[:32],
        lost_samples=-(-shards.lost_samples * kept // shards.num_samples),  # the part's share of them
    )


def rows_of(subset: ShardRows) -> NDArray[np.int64]:
    """The stored rows of a shard that are in the part, ascending: int64 [samples of the part]."""
    every = np.arange(subset.stored, dtype=np.int64)
    if subset.stored == 0:
        return every
    key = hash_words(RandomStream.HOLD_OUT, _SEED, subset.number)
    is_held_out = permute(every, size=subset.stored, key=key) < subset.held_out
    return every[is_held_out if subset.which == "held_out" else ~is_held_out]


def index_of(subset: ShardRows | None, index: ShardIndex) -> ShardIndex:
    """A shard's index with the part's samples alone; without those at the end that a damaged shard has lost."""
    if subset is None:
        return index
    rows = rows_of(subset)
    return index.take(rows[rows < len(index)].tolist())


def shared_images(one: ShardSet, other: ShardSet) -> int:
    """How many images of `one` are also in `other`, by the tars that both have: in one place, or of the same bytes.

    The same images in other tars are not seen (`shardvit check` finds them). Takes some 10 µs a shard.
    """
    known = {mark: entry for entry in one.shards for mark in (entry.url, entry.sha256) if mark}
    shared: dict[str, int] = {}
    for entry in other.shards:
        if own := known.get(entry.url) or known.get(entry.sha256):
            (start, end), (other_start, other_end) = _span(own), _span(entry)
            rows = max(0, min(end, other_end) - max(start, other_start))
            shared[own.url] = max(shared.get(own.url, 0), rows)
    return sum(shared.values())


def _span(entry: ShardEntry) -> tuple[int, int]:
    """Its part's places in the order of a shard's rows in which the held-out ones come first (see `rows_of`)."""
    if (part := entry.subset) is None:
        return 0, entry.num_samples
    return (0, part.held_out) if part.which == "held_out" else (part.held_out, part.stored)


def _held_out_of_shards(sizes: tuple[int, ...], *, total: int) -> list[int]:
    """Held-out samples of each shard: `total` over all, spread over the shards in random order by a random start."""
    num_samples = sum(sizes)
    drawn = hash_words(RandomStream.HOLD_OUT_SHARDS, _SEED, np.arange(len(sizes), dtype=np.uint64))
    done = int(hash_words(RandomStream.HOLD_OUT_SHARDS, _SEED, len(sizes))[0]) % num_samples
    counts = [0] * len(sizes)
    for number in np.argsort(drawn, kind="stable").tolist():  # Python's integers: total * num_samples is large
        before, done = done, done + total * sizes[number]
        counts[number] = done // num_samples - before // num_samples
    return counts

"""Pairs that may be duplicates, from fingerprints alone: equal digests, and hashes near each other.

The smaller side is indexed, in blocks of 131,072 images (140 MB each), and the larger one streamed past every block,
part by part and on all cores. So memory is constant but for what is found, at most 8 candidates an image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_shards.duplicates.fingerprint import FingerprintRequest, Fingerprints, Kind
from data_shards.duplicates.hash_index import HashIndex, Int64s, expand
from data_shards.duplicates.perceptual_hash import NUM_VARIANTS, Words, mirrored

BLOCK_IMAGES = 1 << 17
MOST_CANDIDATES = 8  # of one image, in one other collection
EQUAL_BYTES, EQUAL_PIXELS = -2, -1  # in place of a distance

PAIR = np.dtype([("image", np.int64), ("other", np.int64), ("distance", np.int16)])
Pairs = NDArray[Any]  # of PAIR; images are numbered through all parts of their collection


def find_candidates(
    images: FingerprintRequest,
    others: FingerprintRequest,
    *,
    threads: int,
    done: Callable[[int], None],
    block_images: int = BLOCK_IMAGES,
) -> Pairs:
    """Candidates, the nearest of each image first; of a collection with itself, each pair once, the later image first.

    One of the two requests must have variants. `done` is told how many images were looked up in a block.
    """
    within = images.collection.digest == others.collection.digest
    is_swapped = not others.variants
    indexed, streamed = (images, others) if is_swapped else (others, images)
    starts = np.cumsum([0, *streamed.collection.sizes])
    found = np.empty(0, PAIR)
    for block in _blocks(indexed, block_images, is_swapped=is_swapped):

        def look_up(part: int, block: _Block = block) -> Pairs:
            pairs = block.look_up(streamed.load(part), first=int(starts[part]), is_swapped=is_swapped, within=within)
            pairs = pairs[pairs["other"] < pairs["image"]] if within else pairs
            return _nearest(pairs)

        with ThreadPoolExecutor(threads) as pool:
            waiting: list[Pairs] = [found]
            for part, pairs in enumerate(pool.map(look_up, range(len(streamed.collection.sizes)))):
                waiting.append(pairs)
                done(streamed.collection.sizes[part])
                if sum(map(len, waiting[1:])) > max(1 << 20, len(waiting[0])):
                    waiting = [_nearest(np.concatenate(waiting))]
            found = _nearest(np.concatenate(waiting))
    return found


@dataclass(frozen=True)
class _Block:
    """Some images of the indexed side; `first` is the number of the first."""

    first: int
    index: HashIndex
    hashed: Int64s  # rows that have a hash
    by_bytes: _Digests
    by_pixels: _Digests

    def look_up(self, part: Fingerprints, *, first: int, is_swapped: bool, within: bool) -> Pairs:
        rows = part.rows
        read, plain, hashed = (
            np.flatnonzero(chosen)
            for chosen in (
                rows["kind"] != Kind.UNREAD,
                rows["kind"] == Kind.PIXELS,
                rows["kind"] == Kind.HASH,
            )
        )
        equal = [
            (read, self.by_bytes, rows["bytes_digest"], EQUAL_BYTES),
            (plain, self.by_pixels, rows["words"], EQUAL_PIXELS),
        ]
        pairs: list[Pairs] = []
        is_done = np.zeros(len(rows), np.bool_)
        for chosen, table, digests, distance in equal:
            own, there = table.equal(digests[chosen], is_swapped=is_swapped)
            own, there = chosen[own], there + self.first
            is_done[own] = not is_swapped and (there < own + first if within else True)
            pairs.append(_pairs(own + first, there, np.full(len(own), distance), is_swapped=is_swapped))
        hashed = hashed[~is_done[hashed]]
        if is_swapped:
            hashed = _different(rows["words"], hashed)
        hashes = rows["words"][hashed]
        for queries in (hashes, mirrored(hashes)):
            near = self.index.near(queries)
            there = self.hashed[near.hashes // NUM_VARIANTS] + self.first
            pairs.append(_pairs(hashed[near.queries] + first, there, near.distances, is_swapped=is_swapped))
        return np.concatenate(pairs)


@dataclass(frozen=True)
class _Digests:
    """Digests in order of their first word, and the row of each."""

    words: Words
    rows: Int64s

    @classmethod
    def of(cls, digests: Words, rows: Int64s) -> _Digests:
        digests = digests[rows]
        order = np.argsort(digests[:, 0], kind="stable")
        return cls(digests[order], rows[order])

    def equal(self, digests: Words, *, is_swapped: bool) -> tuple[Int64s, Int64s]:
        """Pairs of equal ones: positions in `digests`, and rows.

        One for each of `digests`; or, if these are the others', one for each row. A picture that says "not available",
        a million times on both sides, would have 10^12 pairs.
        """
        own = np.unique(digests[:, 0], return_index=True)[1] if is_swapped else np.arange(len(digests))
        first_words = digests[own, 0]
        starts, stops = (np.searchsorted(self.words[:, 0], first_words, side=side) for side in ("left", "right"))
        counts = stops - starts if is_swapped else np.minimum(stops - starts, 1)
        own, places = np.repeat(own, counts), expand(starts, counts)
        same = (self.words[places] == digests[own]).all(axis=1)
        return own[same], self.rows[places[same]]


def _blocks(request: FingerprintRequest, most_images: int, *, is_swapped: bool) -> Iterator[_Block]:
    waiting: list[Fingerprints] = []
    first = number = 0
    for part, size in enumerate(request.collection.sizes):
        waiting.append(request.load(part))
        number += size
        if number - first >= most_images or part == len(request.collection.sizes) - 1:
            yield _block(waiting, first, is_swapped=is_swapped)
            waiting, first = [], number


def _block(parts: list[Fingerprints], first: int, *, is_swapped: bool) -> _Block:
    rows = np.concatenate([part.rows for part in parts])
    variants = np.concatenate([part.variants for part in parts if part.variants is not None])
    hashed = np.flatnonzero(rows["kind"] == Kind.HASH)
    hashed = hashed if is_swapped else _different(rows["words"], hashed)
    return _Block(
        first=first,
        index=HashIndex(variants[hashed].reshape(-1, variants.shape[-1])),
        hashed=hashed,
        by_bytes=_Digests.of(rows["bytes_digest"], np.flatnonzero(rows["kind"] != Kind.UNREAD)),
        by_pixels=_Digests.of(rows["words"], np.flatnonzero(rows["kind"] == Kind.PIXELS)),
    )


def _different(hashes: Words, rows: Int64s) -> Int64s:
    """Of the others' images with the same hash the first: it stands for all, in ascending order."""
    ordered = rows[np.lexsort((rows, hashes[rows, 1], hashes[rows, 0]))]
    again = (hashes[ordered[1:]] == hashes[ordered[:-1]]).all(axis=1)
    return np.sort(ordered[np.append(True, ~again)[: len(ordered)]])


def _pairs(streamed: Int64s, indexed: Int64s, found: NDArray[Any], *, is_swapped: bool) -> Pairs:
    pairs = np.empty(len(streamed), PAIR)
    pairs["image"], pairs["other"] = (indexed, streamed) if is_swapped else (streamed, indexed)
    pairs["distance"] = found
    return pairs


def _nearest(pairs: Pairs) -> Pairs:
    """Each pair once, with its least distance, and at most `MOST_CANDIDATES` of an image, the nearest first."""
    pairs = pairs[np.lexsort((pairs["distance"], pairs["other"], pairs["image"]))]
    if len(pairs):
        again = (pairs["image"][1:] == pairs["image"][:-1]) & (pairs["other"][1:] == pairs["other"][:-1])
        pairs = pairs[np.append(True, ~again)]
    pairs = pairs[np.lexsort((pairs["other"], pairs["distance"], pairs["image"]))]
    is_first = np.append(True, pairs["image"][1:] != pairs["image"][:-1])[: len(pairs)]
    starts = np.flatnonzero(is_first)
    rank = np.arange(len(pairs)) - np.repeat(starts, np.diff(np.append(starts, len(pairs))))
    return pairs[rank < MOST_CANDIDATES]

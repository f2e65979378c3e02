"""Find candidate duplicates from fingerprints alone: equal digests, and hashes near each other.

Each image is searched for as a crop of the others, and they as crops of it (see `perceptual_hash`). Thousands of images
on one background have nearby hashes, so an image's thumbnail is aligned with those of its 64 nearest (see `likeness`),
and the 8 best fits are its candidates. The smaller side is indexed in blocks of 32,768 images (160 MB each), and the
larger one streamed past each block on all cores: memory is constant apart from the results. Time grows with the product
of both sides, so two large ones are joined on disk (`disk_join`).
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.checking.near_duplicates.fingerprint import Fingerprints, KeptFingerprints, Kind
from shardvit.data_shards.checking.near_duplicates.likeness import align
from shardvit.data_shards.checking.near_duplicates.perceptual_hash import (
    NUM_WORDS,
    PARTS,
    WHOLE,
    HashIndex,
    Int64s,
    Windows,
    Words,
    expand,
    hash_windows,
    mirrored,
)

BLOCK_IMAGES = 1 << 15
MOST_CANDIDATES = 8  # per image and other collection
EQUAL_BYTES, EQUAL_PIXELS = -2, -1  # in place of a distance
MOST_NEAR = 64  # per image, by hash; their thumbnails are aligned
_MOST_DISTANCE = 0.3  # 1 - correlation of the thumbnails
_MOST_OF_ONE_HASH = 4  # others with equal hashes that are kept, standing for all
AT_ONCE = 128  # images looked up together
_PAIRS_AT_ONCE = 1024  # pairs aligned together: 30 MB

# Images are numbered across parts. Window `here` of the image, or of its mirror image, shows what window `there` of the
# other shows.
PAIR = np.dtype(
    [
        ("image", np.int64),
        ("other", np.int64),
        ("distance", np.float32),  # bits, then 1 - correlation
        ("here", np.float32, 4),
        ("there", np.float32, 4),
        ("mirrored", np.bool_),
    ]
)
Pairs = NDArray[Any]  # of PAIR


def find_candidates(
    images: KeptFingerprints,
    others: KeptFingerprints,
    *,
    threads: int,
    done: Callable[[int], None],
    block_images: int = BLOCK_IMAGES,
) -> Pairs:
    """Find candidates, nearest first per image; within one collection each pair once, the later image first."""
    within = images.digest == others.digest
    is_swapped = sum(images.sizes) < sum(others.sizes)
    indexed, streamed = (images, others) if is_swapped else (others, images)
    starts = streamed.starts

    def found() -> Iterator[Pairs]:
        for block in _blocks(indexed, block_images, is_swapped=is_swapped):

            def look_up(part: int, block: _Block = block) -> Pairs:
                return block.look_up(streamed.load(part), first=int(starts[part]), within=within)

            with ThreadPoolExecutor(threads) as pool:
                for part, pairs in enumerate(pool.map(look_up, range(len(streamed.sizes)))):
                    yield pairs
                    done(streamed.sizes[part])

    return nearest_of(found(), MOST_CANDIDATES)


class _Block:
    def __init__(self, parts: list[Fingerprints], first: int, *, is_swapped: bool) -> None:
        rows = np.concatenate(parts)
        self.first, self.is_swapped, self.thumbnails = first, is_swapped, rows["thumbnail"]
        hashed = np.flatnonzero(rows["kind"] == Kind.HASH)
        self.hashed = hashed if is_swapped else hashed[first_of_each(rows["words"][hashed])]  # rows with a hash
        self.parts, self.wholes = self._index(PARTS), self._index(WHOLE)
        self.by_bytes = Digests(rows["bytes_digest"], np.flatnonzero(rows["kind"] != Kind.UNREAD))
        self.by_pixels = Digests(rows["words"], np.flatnonzero(rows["kind"] == Kind.PIXELS))

    def _in_order(self, streamed: Any, indexed: Any) -> tuple[Any, Any]:
        """Turn it into (image, other), or back."""
        return (indexed, streamed) if self.is_swapped else (streamed, indexed)

    def _index(self, windows: Windows) -> HashIndex:
        chunks = (self.hashed[at : at + AT_ONCE] for at in range(0, max(1, len(self.hashed)), AT_ONCE))
        hashes = [hash_windows(self.thumbnails[chunk], windows).reshape(-1, NUM_WORDS) for chunk in chunks]
        return HashIndex(np.concatenate(hashes))

    def look_up(self, part: Fingerprints, *, first: int, within: bool) -> Pairs:
        is_swapped = self.is_swapped
        kinds = part["kind"]
        read, plain, hashed = map(np.flatnonzero, (kinds != Kind.UNREAD, kinds == Kind.PIXELS, kinds == Kind.HASH))
        equal = [
            (read, self.by_bytes, part["bytes_digest"], EQUAL_BYTES),
            (plain, self.by_pixels, part["words"], EQUAL_PIXELS),
        ]
        pairs: list[Pairs] = []
        is_done = np.zeros(len(part), np.bool_)
        for chosen, table, digests, distance in equal:
            own, there = table.equal(digests[chosen], is_swapped=is_swapped)
            own, there = chosen[own], there + self.first
            is_done[own] = not is_swapped and (there < own + first if within else True)
            pairs.append(make_pairs(*self._in_order(own + first, there), distance))
        hashed = hashed[~is_done[hashed]]
        if is_swapped:
            hashed = hashed[first_of_each(part["words"][hashed])]
        for at in range(0, len(hashed), AT_ONCE):
            chosen = hashed[at : at + AT_ONCE]
            found = (earlier(each) if within else each for each in self._near(part, chosen, first))
            near = nearest(np.concatenate([nearest(each, MOST_NEAR) for each in found]), MOST_NEAR)
            streamed, indexed = self._in_order("image", "other")
            thumbnails = part["thumbnail"][near[streamed] - first], self.thumbnails[near[indexed] - self.first]
            pairs.append(laid(near, *self._in_order(*thumbnails)))
        found = np.concatenate(pairs)
        return nearest(earlier(found) if within else found, MOST_CANDIDATES)

    def _near(self, part: Fingerprints, rows: Int64s, first: int) -> Iterator[Pairs]:
        for own, index, theirs in ((WHOLE, self.parts, PARTS), (PARTS, self.wholes, WHOLE)):
            hashes = hash_windows(part["thumbnail"][rows], own).reshape(-1, NUM_WORDS)
            for is_mirrored in (False, True):
                near = index.near(mirrored(hashes) if is_mirrored else hashes)
                row, window = np.divmod(near.queries, len(own))
                there, their_window = np.divmod(near.hashes, len(theirs))
                numbers = self._in_order(rows[row] + first, self.hashed[there] + self.first)
                windows = self._in_order(own[window], theirs[their_window])
                yield make_pairs(*numbers, near.distances, *windows, is_mirrored=is_mirrored)


class Digests:
    """Table of 128-bit digests, uint64 [all, 2], of which `rows` count."""

    def __init__(self, digests: Words, rows: Int64s) -> None:
        order = rows[np.argsort(digests[rows, 0], kind="stable")]
        self.words, self.rows = digests[order], order

    def equal(self, digests: Words, *, is_swapped: bool) -> tuple[Int64s, Int64s]:
        """Find pairs of equal digests: positions in `digests`, and rows.

        One pair per digest, or if swapped per row: a million placeholders on both sides would make 10^12 pairs.
        """
        own = np.unique(digests[:, 0], return_index=True)[1] if is_swapped else np.arange(len(digests))
        first_words = digests[own, 0]
        starts, stops = (np.searchsorted(self.words[:, 0], first_words, side=side) for side in ("left", "right"))
        counts = stops - starts if is_swapped else np.minimum(stops - starts, 1)
        own, places = np.repeat(own, counts), expand(starts, counts)
        same = (self.words[places] == digests[own]).all(axis=1)
        return own[same], self.rows[places[same]]


def laid(pairs: Pairs, images: NDArray[np.uint8], others: NDArray[np.uint8]) -> Pairs:
    """Align the thumbnails of each pair, both uint8 [pairs, 32, 32], and keep the pairs that fit."""
    chunks = (slice(at, at + _PAIRS_AT_ONCE) for at in range(0, len(pairs), _PAIRS_AT_ONCE))
    return np.concatenate([pairs[:0], *(_laid(pairs[each], images[each], others[each]) for each in chunks)])


def _laid(pairs: Pairs, images: NDArray[np.uint8], others: NDArray[np.uint8]) -> Pairs:
    is_mirrored = pairs["mirrored"][:, None, None]
    images = np.where(is_mirrored, images[..., ::-1], images)
    # Both images show all of the larger window; the smaller one, a part of its image, is moved.
    sides = [np.ptp(pairs[name].reshape(-1, 2, 2), axis=1).sum(axis=1) for name in ("here", "there")]
    is_part = (sides[0] < sides[1])[:, None]
    windows = np.where(is_part, pairs["there"], pairs["here"]), np.where(is_part, pairs["here"], pairs["there"])
    both = images, others
    fixed, movable = (np.where(is_part[..., None], *order) for order in (both[::-1], both))
    moved, correlations = align(fixed, movable, *windows)
    pairs["here"] = np.where(is_part, moved, pairs["here"])
    pairs["there"] = np.where(is_part, pairs["there"], moved)
    pairs["distance"] = np.maximum(0, 1 - correlations)
    return pairs[pairs["distance"] <= _MOST_DISTANCE]


def _blocks(request: KeptFingerprints, most_images: int, *, is_swapped: bool) -> Iterator[_Block]:
    waiting: list[Fingerprints] = []
    first = number = 0
    for part, size in enumerate(request.sizes):
        waiting.append(request.load(part))
        number += size
        if number - first >= most_images or part == len(request.sizes) - 1:
            yield _Block(waiting, first, is_swapped=is_swapped)
            waiting, first = [], number


def first_of_each(words: Words, *columns: NDArray[Any]) -> Int64s:
    """Choose the first few rows of those that are equal in their words, [rows, 2], and all columns."""
    keys = [*words.T, *columns]
    order = np.argsort(keys[0])
    is_again = np.diff(keys[0][order]) == 0  # to sort these alone by all keys takes a fifth of the time
    several = np.unique(np.concatenate([order[:-1][is_again], order[1:][is_again]]))
    keys = [key[several] for key in keys]
    order = np.lexsort(keys)
    is_first = np.append(True, np.any([np.diff(key[order]) != 0 for key in keys], axis=0))[: len(order)]
    return np.delete(np.arange(len(words)), several[order[ranks(is_first) >= _MOST_OF_ONE_HASH]])


def make_pairs(
    images: Int64s, others: Int64s, distances: Any, here: Any = 0.0, there: Any = 0.0, *, is_mirrored: bool = False
) -> Pairs:
    """Make pairs; `is_mirrored`: `here` shows what `there` shows in a mirror."""
    pairs = np.zeros(len(images), PAIR)
    pairs["image"], pairs["other"], pairs["distance"] = images, others, distances
    pairs["here"], pairs["there"], pairs["mirrored"] = here, there, is_mirrored
    if is_mirrored:  # the window's place in the mirror image
        pairs["here"][:, 1::2] = 1 - pairs["here"][:, 3::-2]
    return pairs


def earlier(pairs: Pairs) -> Pairs:
    """Keep pairs within one collection whose image is the later one."""
    return pairs[pairs["other"] < pairs["image"]]


def nearest(pairs: Pairs, most: int) -> Pairs:
    """Keep each pair once, at its least distance, and the `most` nearest of an image, nearest first."""
    pairs = pairs[np.lexsort((pairs["distance"], pairs["other"], pairs["image"]))]
    if len(pairs):
        again = (pairs["image"][1:] == pairs["image"][:-1]) & (pairs["other"][1:] == pairs["other"][:-1])
        pairs = pairs[np.append(True, ~again)]
    pairs = pairs[np.lexsort((pairs["other"], pairs["distance"], pairs["image"]))]
    is_first = np.append(True, pairs["image"][1:] != pairs["image"][:-1])[: len(pairs)]
    return pairs[ranks(is_first) < most]


def nearest_of(found: Iterable[Pairs], most: int) -> Pairs:
    """Keep the `most` nearest of an image, reducing whenever a million pairs or twice what is kept have come."""
    waiting, number, kept = [np.empty(0, PAIR)], 0, 0
    for pairs in found:
        waiting.append(pairs)
        number += len(pairs)
        if number > max(1 << 20, kept):
            waiting = [nearest(np.concatenate(waiting), most)]
            number, kept = 0, len(waiting[0])
    return nearest(np.concatenate(waiting), most)


def ranks(is_first: NDArray[np.bool_]) -> Int64s:
    """Number the members of each run from 0, given where runs begin."""
    starts = np.flatnonzero(is_first)
    return np.arange(len(is_first)) - np.repeat(starts, np.diff(np.append(starts, len(is_first))))

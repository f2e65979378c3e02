"""Hashes near a hash, among millions: multi-index hashing, exact up to 7 of the first 64 bits.

The first word of a hash is cut into four bands of 16 bits. Two words that differ in at most 7 bits differ in at most
one bit of some band, so the 17 values that a band may then have are looked up in a table of each band, and what stands
there is compared. Many that differ in 8 to 10 bits are found too. Built from the smaller of two sets, in blocks, with
the larger one streamed past: memory does not depend on the larger one.

Takes 56 bytes a hash and 2,176 comparisons for a query among a million evenly spread hashes; photographs need
twice as many. (Norouzi, Punjani and Fleet, Fast Search in Hamming Space with Multi-Index Hashing, 2012.)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_shards.checking.near_duplicates.perceptual_hash import Words, distances

Int64s = NDArray[np.int64]

_BANDS = 4
_VALUES = 1 << 16  # of a band
# A band's value and all values at one bit from it.
_PROBES = np.array([0, *(1 << bit for bit in range(16))], np.uint16)
MOST_FIRST = 10  # bits of the first word; up to 7 are found for certain
MOST_BITS = 36  # of both words: those of a smooth image are noise in the second
_MOST_AT_ONCE = 1 << 22  # comparisons


class Near(NamedTuple):
    """Numbers of queries and of hashes near them, and how many bits differ; a pair may come several times."""

    queries: Int64s
    hashes: Int64s
    distances: NDArray[np.uint8]


class HashIndex:
    """An index of `hashes`, uint64 [hashes, 2]."""

    def __init__(self, hashes: Words) -> None:
        self._second = np.ascontiguousarray(hashes[:, 1])
        bands = np.ascontiguousarray(hashes[:, 0]).view(np.uint16).reshape(-1, _BANDS)
        self._orders, self._firsts, self._starts = [], [], []
        for band in bands.T:
            order = np.argsort(band, kind="stable").astype(np.uint32)
            self._orders.append(order)
            self._firsts.append(hashes[order, 0])
            self._starts.append(np.append(0, np.cumsum(np.bincount(band, minlength=_VALUES))))

    def near(self, queries: Words) -> Near:
        """The hashes within `MOST_FIRST` and `MOST_BITS` of each of `queries`, uint64 [queries, 2]."""
        found = [self._near_in_band(queries, band, probe) for band in range(_BANDS) for probe in range(len(_PROBES))]
        return Near(*(np.concatenate(column) for column in zip(*found, strict=True)))

    def _near_in_band(self, queries: Words, band: int, probe: int) -> Near:
        values = (queries[:, 0] >> np.uint64(16 * band)).astype(np.uint16) ^ _PROBES[probe]
        starts, stops = self._starts[band][values], self._starts[band][values + np.int64(1)]
        counts = stops - starts
        ends = np.cumsum(counts)
        found: list[Near] = []
        done = 0
        while done < len(queries):
            # as many queries at once as memory is meant for
            before = ends[done - 1] if done else 0
            until = max(done + 1, int(np.searchsorted(ends, before + _MOST_AT_ONCE, side="right")))
            part = slice(done, until)
            rows = np.repeat(np.arange(done, until), counts[part])
            places = expand(starts[part], counts[part])
            is_near = np.bitwise_count(self._firsts[band][places] ^ queries[rows, 0]) <= MOST_FIRST
            rows, places = rows[is_near], places[is_near]
            hashes = self._orders[band][places].astype(np.int64)
            both = np.stack([self._firsts[band][places], self._second[hashes]], axis=-1)
            bits = distances(both, queries[rows])
            is_near = bits <= MOST_BITS
            found.append(Near(rows[is_near], hashes[is_near], bits[is_near]))
            done = until
        return Near(*(np.concatenate(column) for column in zip(*found, strict=True))) if found else _NONE


def expand(starts: Int64s, counts: Int64s) -> Int64s:
    """The numbers starts[i], starts[i] + 1, ..., `counts[i]` of them, for each i in turn."""
    before = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(starts - before, counts)


_NONE = Near(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint8))

"""The index against comparing all with all."""

import numpy as np
import pytest

from data_shards.checking.near_duplicates import perceptual_hash
from data_shards.checking.near_duplicates.perceptual_hash import MOST_BITS, MOST_FIRST, HashIndex, distances


def flipped(hashes: np.ndarray, draw: np.random.Generator, *, bits: int) -> np.ndarray:
    """With so many of the first word's bits flipped, and up to 10 of the second's."""
    found = hashes.copy()
    for row in found:
        for word, number in ((0, bits), (1, draw.integers(0, 11))):
            for bit in draw.choice(64, number, replace=False).tolist():
                row[word] ^= np.uint64(1 << bit)
    return found


def draw_hashes(number: int) -> tuple[np.ndarray, np.random.Generator]:
    draw = np.random.default_rng(3)
    return draw.integers(0, 1 << 63, (number, 2), dtype=np.uint64, endpoint=True), draw


@pytest.mark.parametrize("at_once", [7, 1 << 22])
def test_all_within_seven_bits_are_found_and_nothing_beyond_the_limits(at_once: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(perceptual_hash, "_MOST_AT_ONCE", at_once)
    hashes, draw = draw_hashes(500)
    index = HashIndex(hashes)
    for bits in range(13):
        queries = flipped(hashes, draw, bits=bits)
        near = index.near(queries)
        found = set(zip(near.queries.tolist(), near.hashes.tolist(), strict=True))
        assert (near.distances == distances(queries[near.queries], hashes[near.hashes])).all()
        first = distances(queries[:, None, :1], hashes[None, :, :1])
        allowed = (first <= MOST_FIRST) & (distances(queries[:, None], hashes[None]) <= MOST_BITS)
        certain = allowed & (first <= 7)
        assert set(zip(*map(np.ndarray.tolist, np.nonzero(certain)), strict=True)) <= found
        assert found <= set(zip(*map(np.ndarray.tolist, np.nonzero(allowed)), strict=True))
        assert (len(found) >= 500) == (bits <= 7) or bits in (8, 9, 10)


def test_nothing_asked_and_nothing_indexed():
    hashes, _ = draw_hashes(3)
    assert len(HashIndex(hashes).near(hashes[:0]).queries) == 0
    assert len(HashIndex(hashes[:0]).near(hashes).queries) == 0

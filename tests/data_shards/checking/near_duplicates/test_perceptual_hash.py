"""The hash against scipy's cosine transform, and the index against comparing all with all."""

import numpy as np
import pytest
import scipy.fft
from PIL import Image

from shardvit.data_shards.checking.near_duplicates import perceptual_hash
from shardvit.data_shards.checking.near_duplicates.perceptual_hash import (
    MOST_BITS,
    MOST_FIRST,
    HashIndex,
    distances,
    hash_windows,
    mirrored,
    sampling,
    thumbnail,
)
from tests.data_shards.checking.near_duplicates.planted import photographs

CENTRE = np.array([[0.05, 0.05, 0.95, 0.95]], np.float32)


def thumbnails(images: list[Image.Image]) -> np.ndarray:
    return np.stack([thumbnail(np.asarray(image.convert("L"))).astype(np.float32) for image in images])


def hashes_of(greys: np.ndarray) -> np.ndarray:
    return hash_windows(greys, CENTRE)[:, 0]


def test_the_bits_are_the_signs_of_the_lowest_frequencies():
    greys = thumbnails(photographs(5))
    window = sampling(0.05, 0.95, 32)
    transformed = scipy.fft.dctn(window @ greys.astype(np.float64) @ window.T, axes=(1, 2))
    low = [(y, x) for y in range(32) for x in range(32) if 0 < y + x <= 14]  # 119 of the 128
    lowest_64 = sorted(low, key=sum)[:44]  # whole diagonals, up to the eighth
    bits = np.unpackbits(hashes_of(greys).view(np.uint8), axis=1)
    counts = [sum(int(transformed[i][at] > 0) for at in low) for i in range(5)]
    assert all(0 <= total - count <= 9 for total, count in zip(bits.sum(axis=1).tolist(), counts, strict=True))
    firsts = [sum(int(transformed[i][at] > 0) for at in lowest_64) for i in range(5)]
    assert all(0 <= t - c <= 20 for t, c in zip(bits[:, :64].sum(axis=1).tolist(), firsts, strict=True))


def test_the_mirror_images_hash_needs_no_pixels():
    greys = thumbnails(photographs(20))
    hashes = hashes_of(greys)
    of_mirrored = hashes_of(np.ascontiguousarray(greys[:, :, ::-1]))
    assert distances(mirrored(hashes), of_mirrored).max() <= 1  # a coefficient at zero rounds to either side
    assert (mirrored(mirrored(hashes)) == hashes).all()
    assert distances(hashes, of_mirrored).min() > 20


def test_brightness_and_contrast_change_nothing():
    greys = thumbnails(photographs(20))
    assert distances(hashes_of(greys), hashes_of(greys * 0.5 + 60)).max() <= 1


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

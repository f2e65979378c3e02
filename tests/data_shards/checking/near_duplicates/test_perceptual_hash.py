"""The hash against scipy's cosine transform, and its laws."""

import numpy as np
import pytest
import scipy.fft
from PIL import Image

from data_shards.checking.near_duplicates.perceptual_hash import (
    MOST_FIRST,
    PARTS,
    WHOLE,
    distances,
    hash_windows,
    mirrored,
    sampling,
    thumbnail,
)
from tests.data_shards.checking.near_duplicates.planted import edited, photographs

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


@pytest.mark.parametrize("edit", ["none", "cropped", "cropped 80 %", "cropped 70 %", "square", "border"])
def test_a_crop_is_near_one_of_the_windows(edit: str):
    images = [image.resize((96, 72)) for image in photographs(40)]
    crops = [edited(image, edit, seed=seed) for seed, image in enumerate(images)]
    parts, hashes = hash_windows(thumbnails(images), PARTS), hash_windows(thumbnails(crops), WHOLE)
    assert parts.shape == (40, len(PARTS), 2) and hashes.shape == (40, len(WHOLE), 2)
    if edit == "border":  # which the other is a crop of
        parts, hashes = hash_windows(thumbnails(crops), PARTS), hash_windows(thumbnails(images), WHOLE)
    nearest = distances(parts[:, :, None, :1], hashes[:, None, :, :1]).min(axis=(1, 2))
    assert np.median(nearest) <= 5 and np.mean(nearest <= MOST_FIRST) >= 0.95


def test_what_is_not_cropped_is_hashed_in_the_same_place():
    assert any((part == whole).all() for part in PARTS for whole in WHOLE)

"""The hash against scipy's cosine transform, and its laws."""

import numpy as np
import pytest
import scipy.fft
from PIL import Image

from data_shards.duplicates.perceptual_hash import (
    NUM_VARIANTS,
    distances,
    hash_thumbnails,
    hash_variants,
    mirrored,
)
from data_shards.duplicates.thumbnail import sampling, thumbnail
from tests.data_shards.duplicates.planted import edited, photographs


def thumbnails(images: list[Image.Image]) -> np.ndarray:
    return np.stack([thumbnail(np.asarray(image.convert("L"))).astype(np.float32) for image in images])


def test_the_bits_are_the_signs_of_the_lowest_frequencies():
    greys = thumbnails(photographs(5))
    window = sampling(0.05, 0.95, 64)
    inner = window @ greys.astype(np.float64) @ window.T
    transformed = scipy.fft.dctn(inner, axes=(1, 2))
    low = [(y, x) for y in range(32) for x in range(32) if 0 < y + x <= 14]  # 119 of the 128
    lowest_64 = sorted(low, key=sum)[:44]  # whole diagonals, up to the eighth
    bits = np.unpackbits(hash_thumbnails(greys).view(np.uint8), axis=1)
    counts = [sum(int(transformed[i][at] > 0) for at in low) for i in range(5)]
    assert all(0 <= total - count <= 9 for total, count in zip(bits.sum(axis=1).tolist(), counts, strict=True))
    firsts = [sum(int(transformed[i][at] > 0) for at in lowest_64) for i in range(5)]
    assert all(0 <= t - c <= 20 for t, c in zip(bits[:, :64].sum(axis=1).tolist(), firsts, strict=True))


def test_the_mirror_images_hash_needs_no_pixels():
    greys = thumbnails(photographs(20))
    hashes = hash_thumbnails(greys)
    of_mirrored = hash_thumbnails(np.ascontiguousarray(greys[:, :, ::-1]))
    assert distances(mirrored(hashes), of_mirrored).max() <= 1  # a coefficient at zero rounds to either side
    assert (mirrored(mirrored(hashes)) == hashes).all()
    assert distances(hashes, of_mirrored).min() > 20


def test_brightness_and_contrast_change_nothing():
    greys = thumbnails(photographs(20))
    assert distances(hash_thumbnails(greys), hash_thumbnails(greys * 0.5 + 60)).max() <= 1


@pytest.mark.parametrize("which", ["cropped here", "cropped there"])
def test_a_crop_is_near_one_of_the_variants(which: str):
    images = photographs(40)
    crops = [edited(image, "cropped", seed=seed) for seed, image in enumerate(images)]
    indexed, asked = (images, crops) if which == "cropped here" else (crops, images)
    variants = hash_variants(thumbnails(indexed))
    assert variants.shape == (40, NUM_VARIANTS, 2)
    hashes = hash_thumbnails(thumbnails(asked))
    nearest = distances(variants[..., :1], hashes[:, None, :1]).min(axis=1)
    assert np.median(nearest) <= 4 and nearest.max() <= 9
    assert np.median(distances(variants[:, 0, :1], hashes[:, :1])) > np.median(nearest)


def test_the_first_variant_is_the_hash_itself():
    greys = thumbnails(photographs(10))
    assert (hash_variants(greys)[:, 0] == hash_thumbnails(greys)).all()

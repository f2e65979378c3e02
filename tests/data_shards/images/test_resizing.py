"""Resizing against torchvision's and torch's operators, and against the definitions in whole numbers."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import v2

from shardvit.data_shards.images.resizing import resize
from shardvit.data_shards.vocabulary import CropInterpolation
from tests.data_shards.images.pictures import decibels_between, noise, whole_photograph

law = settings(max_examples=100, deadline=None)  # a deadline measures how busy the machine is

INTERPOLATIONS = {"bilinear": v2.InterpolationMode.BILINEAR, "bicubic": v2.InterpolationMode.BICUBIC}


@law
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 64), st.integers(1, 64), st.integers(0, 99))
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_resize_equals_torchvisions_antialiased_operator(
    interpolation: CropInterpolation, height: int, width: int, tall: int, wide: int, seed: int
):
    image = noise(height, width, seed)
    operator = v2.Resize((tall, wide), interpolation=INTERPOLATIONS[interpolation], antialias=True)
    expected = operator(torch.from_numpy(image).permute(2, 0, 1)).permute(1, 2, 0).numpy()
    resized = resize(image, height=tall, width=wide, interpolation=interpolation)
    assert resized.dtype == np.uint8 and resized.shape == (tall, wide, 3) and resized.flags.c_contiguous
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        np.testing.assert_array_equal(resized, expected)
    else:  # there torchvision reckons in float32 and rounds, and we in whole numbers
        np.testing.assert_allclose(resized.astype(int), expected.astype(int), atol=1, rtol=0)


@pytest.mark.parametrize(("interpolation", "decibels"), [("bilinear", 55), ("bicubic", 55)])
def test_resize_is_near_the_float_kernel_and_does_not_alias(interpolation: CropInterpolation, decibels: float):
    image = np.array(whole_photograph("china"))
    exact = torch.nn.functional.interpolate(
        torch.from_numpy(image).permute(2, 0, 1)[None].double(), size=(150, 224), mode=interpolation, antialias=True
    )
    exact = exact[0].permute(1, 2, 0).numpy().clip(0, 255)
    assert decibels_between(resize(image, height=150, width=224, interpolation=interpolation), exact) > decibels
    stripes = np.zeros((64, 64, 3), dtype=np.uint8)
    stripes[:, ::2] = 255  # a kernel without antialiasing would return black or white
    # Stripes of one pixel leave grey, but for the columns at the edges, whose kernel is cut off
    grey = resize(stripes, height=16, width=16, interpolation=interpolation)[:, 2:-2]
    assert np.abs(grey.astype(int) - 127).max() <= 1


def test_a_square_of_the_right_size_is_left_alone():
    image = noise(32, 32)
    np.testing.assert_array_equal(resize(image, height=32, width=32), image)


def test_a_crop_is_resized_as_if_it_were_an_image_of_its_own():
    """A crop is a view with the whole image's strides."""
    image = noise(60, 80)
    np.testing.assert_array_equal(
        resize(image[5:45, 7:70], height=16, width=16), resize(image[5:45, 7:70].copy(), height=16, width=16)
    )


@law
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 64), st.integers(1, 64), st.integers(0, 99))
def test_without_antialiasing_it_is_the_plain_bilinear_kernel(height: int, width: int, tall: int, wide: int, seed: int):
    """TensorFlow's `tf.image.resize(..., antialias=False)`, which equals torch's interpolate in float; one level."""
    image = noise(height, width, seed)
    resized = resize(image, height=tall, width=wide, antialias="none")
    floats = torch.nn.functional.interpolate(
        torch.from_numpy(image).permute(2, 0, 1)[None].double(), (tall, wide), mode="bilinear", align_corners=False
    )
    assert resized.dtype == np.uint8 and resized.flags.c_contiguous
    assert np.abs(resized - floats[0].permute(1, 2, 0).numpy()).max() < 1.01


PIXELS = [
    [[173, 252, 186], [85, 202, 190], [91, 224, 92], [28, 222, 21], [236, 96, 172]],
    [[247, 169, 70], [191, 89, 93], [6, 207, 165], [155, 247, 41], [102, 153, 196]],
    [[235, 19, 94], [142, 120, 105], [93, 244, 184], [76, 196, 41], [71, 133, 209]],
    [[228, 182, 97], [246, 179, 139], [77, 226, 156], [86, 48, 5], [192, 178, 169]],
]
CAST = [
    [[185, 238, 166], [138, 206, 170], [95, 194, 153], [76, 221, 104], [57, 224, 47], [119, 174, 89], [213, 105, 176]],
    [[241, 94, 82], [198, 100, 91], [133, 139, 120], [49, 225, 174], [96, 222, 79], [103, 187, 110], [86, 143, 202]],
    [[229, 154, 96], [228, 163, 117], [186, 186, 141], [79, 229, 160], [83, 117, 53], [121, 114, 81], [171, 170, 175]],
]


def test_cast_it_is_tensorflows():
    found = resize(np.array(PIXELS, dtype=np.uint8), height=3, width=7, antialias="cast")
    np.testing.assert_array_equal(found, CAST)


@law
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 64), st.integers(1, 64), st.integers(0, 255))
def test_cast_the_fraction_is_cut_off(height: int, width: int, tall: int, wide: int, seed: int):
    """Equals the kernel in float64, but where float32 may cross a whole number; even areas stay."""
    image = noise(height, width, seed)
    found = resize(image, height=tall, width=wide, antialias="cast")
    floats = torch.nn.functional.interpolate(
        torch.from_numpy(image).permute(2, 0, 1)[None].double(), (tall, wide), mode="bilinear", align_corners=False
    )
    exact = floats[0].permute(1, 2, 0).numpy()
    clear = np.abs(exact - np.round(exact)) > 1e-3
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found[clear], np.floor(exact)[clear])
    even = resize(np.full_like(image, seed), height=tall, width=wide, antialias="cast")
    assert (even == seed).all()


def average(values: np.ndarray, size: int) -> np.ndarray:
    """Average exact fractions along the first axis, span by span."""
    share = Fraction(len(values), size)
    means = []
    for number in range(size):
        low, high = number * share, (number + 1) * share
        weights = [max(Fraction(0), min(high, at + 1) - max(low, at)) for at in range(len(values))]
        means.append(sum(weight * values[at] for at, weight in enumerate(weights) if weight) / share)
    return np.array(means)


@pytest.mark.parametrize(
    ("height", "width", "tall", "wide"), [(12, 9, 5, 4), (5, 7, 12, 7), (6, 4, 3, 8), (1, 1, 4, 3)]
)
def test_area_is_the_mean_over_what_a_pixel_covers_cut_off(height: int, width: int, tall: int, wide: int):
    image = noise(height, width, 4)
    exact = average(average(image.astype(object), tall).swapaxes(0, 1), wide).swapaxes(0, 1)
    resized = resize(image, height=tall, width=wide, interpolation="area")
    floors = np.array([[[math.floor(value) for value in pixel] for pixel in row] for row in exact])
    # A sum of float32 just below a whole number is cut off to the one below it, as TensorFlow's is.
    whole = np.array([[[value == math.floor(value) for value in pixel] for pixel in row] for row in exact])
    assert resized.dtype == np.uint8 and resized.shape == (tall, wide, 3)
    np.testing.assert_array_equal(resized[~whole], floors[~whole])
    assert (floors[whole] - resized[whole] <= 1).all() and (resized[whole] <= floors[whole]).all()


def test_area_is_bit_for_bit_what_tensorflow_gave():
    """`tf.cast(tf.image.resize(image, (5, 11), method="area"), tf.uint8)` of TensorFlow 2.21, the first channel."""
    image = (np.arange(9 * 7 * 3).reshape(9, 7, 3) * 37 % 256).astype(np.uint8)
    resized = resize(image, height=5, width=11, interpolation="area")
    assert resized[:, :, 0].tolist() == [
        [3, 51, 114, 210, 184, 81, 160, 171, 46, 110, 158],
        [19, 67, 130, 226, 200, 96, 176, 187, 62, 126, 174],
        [35, 83, 146, 71, 74, 112, 192, 203, 78, 142, 190],
        [52, 99, 163, 38, 49, 129, 208, 219, 95, 158, 206],
        [68, 115, 179, 54, 65, 145, 122, 113, 111, 174, 222],
    ]

"""Resizing against torchvision's and torch's operators, and against the definitions in whole numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import v2

from data_shards.images.resizing import resize
from data_shards.vocabulary import CropInterpolation
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

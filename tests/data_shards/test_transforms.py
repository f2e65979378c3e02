"""Crops against torchvision's own code fed with the same numbers, and resizing against torchvision's operator."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from torchvision.transforms import RandomResizedCrop, v2

from data_shards.randomness import uniforms
from data_shards.transforms import (
    DRAWS_PER_SAMPLE,
    Box,
    EvalTransform,
    Pixels,
    TrainTransform,
    random_crop,
    resize,
)

law = settings(max_examples=100, deadline=None)  # a deadline measures how busy the machine is

SIDES = st.integers(1, 3000)
AREA, RATIO = (0.05, 1.0), (3 / 4, 4 / 3)


def ranges(low: float, high: float) -> st.SearchStrategy[tuple[float, float]]:
    return st.tuples(st.floats(low, high), st.floats(low, high)).map(lambda pair: (min(pair), max(pair)))


def draws_for(seed: int) -> np.ndarray:
    return uniforms(seed, draws=DRAWS_PER_SAMPLE)[0]


def noise(height: int, width: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def torchvision_crop(
    height: int, width: int, area: tuple[float, float], ratio: tuple[float, float], draws: np.ndarray
) -> Box:
    """torchvision's algorithm, its random numbers replaced by ours."""
    shapes, places = iter(draws[:20].tolist()), iter(draws[20:22].tolist())

    class Uniform:
        def uniform_(self, low: float, high: float) -> "Uniform":
            self.value = low + (high - low) * next(shapes)
            return self

        def item(self) -> float:
            return self.value

        __float__ = item

    class Place:
        def __init__(self, low: int, high: int, size: tuple[int, ...]) -> None:
            self.value = low + int(next(places) * (high - low))

        def item(self) -> int:
            return self.value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda size: Uniform())
        patch.setattr(torch, "randint", lambda low, high, size: Place(low, high, size))
        patch.setattr(torch, "exp", lambda value: torch.tensor(float(value), dtype=torch.float64).exp())
        patch.setattr(torch, "log", lambda value: [float(np.log(side)) for side in ratio])
        image = torch.zeros(1, 1, 1).expand(3, height, width)
        top, left, crop_height, crop_width = RandomResizedCrop.get_params(image, list(area), list(ratio))
    return Box(top=top, left=left, height=crop_height, width=crop_width)


@law
@given(SIDES, SIDES, ranges(0.01, 1.0), ranges(0.2, 5.0), st.integers(0, 2**32))
def test_the_crop_is_torchvisions(
    height: int, width: int, area: tuple[float, float], ratio: tuple[float, float], seed: int
):
    draws = draws_for(seed)
    theirs = torchvision_crop(height, width, area, ratio, draws)
    assume(theirs.height > 0 and theirs.width > 0)  # its fallback may round a side to nothing; ours keeps a pixel
    assert random_crop(height, width, area=area, ratio=ratio, draws=draws) == theirs


@pytest.mark.parametrize(("height", "width"), [(10, 1000), (1000, 10), (1, 1), (1, 40), (7, 7)])
def test_where_nothing_fits_the_centre_is_taken_as_torchvision_does(height: int, width: int):
    ratio = (3 / 4, 4 / 3)
    for area in ((1.0, 1.0), (0.9, 1.0)):
        for seed in range(20):
            draws = draws_for(seed)
            ours = random_crop(height, width, area=area, ratio=ratio, draws=draws)
            assert ours == torchvision_crop(height, width, area, ratio, draws)
            if max(height, width) > 10 * min(height, width):
                assert (ours.top, ours.left) == ((height - ours.height) // 2, (width - ours.width) // 2)


@law
@given(SIDES, SIDES, ranges(0.01, 1.0), ranges(0.2, 5.0), st.lists(st.floats(0, 1 - 2**-53), min_size=23, max_size=23))
def test_a_crop_lies_inside_the_image(
    height: int, width: int, area: tuple[float, float], ratio: tuple[float, float], draws: list[float]
):
    box = random_crop(height, width, area=area, ratio=ratio, draws=np.array(draws))
    assert box.height >= 1 and box.width >= 1 and box.top >= 0 and box.left >= 0
    assert box.top + box.height <= height and box.left + box.width <= width


@law
@given(st.integers(200, 3000), st.integers(200, 3000), st.integers(0, 2**32))
def test_area_and_ratio_stay_in_their_ranges(height: int, width: int, seed: int):
    """Of pictures whose own shape lies in the range; whole pixels let both miss it by half a pixel a side."""
    height = int(np.clip(height, width * 3 / 4, width * 4 / 3))
    box = random_crop(height, width, area=(0.08, 0.9), ratio=RATIO, draws=draws_for(seed))
    slack = 1 / box.height + 1 / box.width
    assert 0.08 * (1 - slack) <= box.height * box.width / (height * width) <= 0.9 * (1 + slack)
    assert RATIO[0] * (1 - slack) <= box.width / box.height <= RATIO[1] * (1 + slack)


def test_area_is_uniform_ratio_log_uniform_and_the_place_uniform():
    # So large and so small a share that every attempt fits and rounding does not show.
    side, all_draws = 20_000, uniforms(5, np.arange(2000), draws=DRAWS_PER_SAMPLE)
    boxes = [random_crop(side, side, area=(0.05, 0.5), ratio=RATIO, draws=draws) for draws in all_draws]
    height, width = (np.array([getattr(box, name) for box in boxes]) for name in ("height", "width"))
    shares = (height * width / side**2 - 0.05) / 0.45
    shapes = np.log(width / height) / np.log(4 / 3) / 2 + 0.5
    down = np.array([box.top for box in boxes]) / (side - height)
    right = np.array([box.left for box in boxes]) / (side - width)
    for numbers in (shares, shapes, down, right):
        assert stats.kstest(numbers, "uniform").pvalue > 1e-3
    for a, b in ((shares, shapes), (shares, down), (shapes, right), (down, right)):
        assert abs(stats.spearmanr(a, b).statistic) < 0.08


# ---- resizing


@law
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 64), st.integers(0, 99))
def test_resize_equals_torchvisions_antialiased_bilinear(height: int, width: int, size: int, seed: int):
    image = noise(height, width, seed)
    operator = v2.Resize((size, size), interpolation=v2.InterpolationMode.BILINEAR, antialias=True)
    expected = operator(torch.from_numpy(image).permute(2, 0, 1)).permute(1, 2, 0).numpy()
    resized = resize(image, image_size=size)
    assert resized.dtype == np.uint8 and resized.shape == (size, size, 3)
    np.testing.assert_array_equal(resized, expected)


def test_resize_is_near_the_float_kernel_and_does_not_alias():
    image = noise(97, 131)
    exact = torch.nn.functional.interpolate(
        torch.from_numpy(image).permute(2, 0, 1)[None].double(), size=(32, 32), mode="bilinear", antialias=True
    )[0].permute(1, 2, 0)
    assert np.abs(resize(image, image_size=32) - exact.numpy()).max() <= 1.01
    stripes = np.zeros((64, 64, 3), dtype=np.uint8)
    stripes[:, ::2] = 255  # a kernel without antialiasing would return black or white
    # Stripes of one pixel leave grey, but for the columns at the edges, whose kernel is cut off
    assert np.abs(resize(stripes, image_size=16)[:, 1:-1].astype(int) - 127).max() <= 1


def test_a_square_of_the_right_size_is_left_alone():
    image = noise(32, 32)
    np.testing.assert_array_equal(resize(image, image_size=32), image)


def test_a_crop_is_resized_as_if_it_were_an_image_of_its_own():
    """A crop is a view with the whole image's strides."""
    image = noise(60, 80)
    np.testing.assert_array_equal(
        resize(image[5:45, 7:70], image_size=16), resize(image[5:45, 7:70].copy(), image_size=16)
    )


# ---- the two transforms


def test_training_crops_resizes_and_flips_by_the_last_number():
    transform, image = TrainTransform(16, crop_area=(0.2, 0.7)), noise(50, 70)
    for seed in range(30):
        draws = draws_for(seed)
        box = random_crop(50, 70, area=(0.2, 0.7), ratio=RATIO, draws=draws)
        square, mirror = transform(image, draws=draws)
        crop = image[box.top : box.top + box.height, box.left : box.left + box.width]
        np.testing.assert_array_equal(square, resize(crop, image_size=16))
        assert mirror is bool(draws[-1] < 0.5)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_the_share_of_the_mirrored(share: float):
    transform, image = TrainTransform(8, flip=share), noise(8, 8)
    all_draws = uniforms(3, np.arange(2000), draws=DRAWS_PER_SAMPLE)
    mirrored = [transform(image, draws=draws)[1] for draws in all_draws]
    assert abs(np.mean(mirrored) - share) <= 4 * (share * (1 - share) / 2000) ** 0.5


def test_the_flip_does_not_depend_on_the_crop():
    transform, image = TrainTransform(8), noise(40, 40)
    all_draws = uniforms(3, np.arange(1000), draws=DRAWS_PER_SAMPLE)
    for column in range(DRAWS_PER_SAMPLE - 1):
        changed = all_draws.copy()
        changed[:, column] = 0.123
        for before, after in zip(all_draws[:50], changed[:50], strict=True):
            assert transform(image, draws=before)[1] == transform(image, draws=after)[1]


def test_evaluation_squashes_the_whole_image():
    image = noise(50, 70)
    transform: Callable[[Pixels], Pixels] = EvalTransform(16)
    np.testing.assert_array_equal(transform(image), resize(image, image_size=16))

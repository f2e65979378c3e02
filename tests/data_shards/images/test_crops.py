"""Crops follow torchvision's own code, fed with the same numbers, and a slow reference of Google's.

The reference is written from the description of TensorFlow's op (its documentation and kernel), counting in whole
numbers and exact fractions; `launch/bench/records/google_path.txt` has a comparison with the op itself.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from torchvision.transforms import RandomResizedCrop

from shardvit.data_shards.images.crops import DRAWS_PER_SAMPLE, Box, google_crop, place_of, torchvision_crop
from shardvit.data_shards.order.randomness import uniforms

law = settings(max_examples=100, deadline=None)  # a deadline measures how busy the machine is

SIDES = st.integers(1, 3000)
RATIO = (3 / 4, 4 / 3)


def ranges(low: float, high: float) -> st.SearchStrategy[tuple[float, float]]:
    return st.tuples(st.floats(low, high), st.floats(low, high)).map(lambda pair: (min(pair), max(pair)))


def draws_for(seed: int) -> np.ndarray:
    return uniforms(seed, draws=DRAWS_PER_SAMPLE)[0]


def theirs_of(height: int, width: int, area: tuple[float, float], ratio: tuple[float, float], draws: np.ndarray) -> Box:
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
    theirs = theirs_of(height, width, area, ratio, draws)
    assume(theirs.height > 0 and theirs.width > 0)  # its fallback may round a side to nothing; ours keeps a pixel
    assert torchvision_crop(height, width, area=area, ratio=ratio, draws=draws) == theirs


@pytest.mark.parametrize(("height", "width"), [(10, 1000), (1000, 10), (1, 1), (1, 40), (7, 7)])
def test_where_nothing_fits_the_centre_is_taken_as_torchvision_does(height: int, width: int):
    ratio = (3 / 4, 4 / 3)
    for area in ((1.0, 1.0), (0.9, 1.0)):
        for seed in range(20):
            draws = draws_for(seed)
            ours = torchvision_crop(height, width, area=area, ratio=ratio, draws=draws)
            assert ours == theirs_of(height, width, area, ratio, draws)
            if max(height, width) > 10 * min(height, width):
                assert (ours.top, ours.left) == ((height - ours.height) // 2, (width - ours.width) // 2)


@law
@given(
    SIDES,
    SIDES,
    ranges(0.01, 1.0),
    ranges(0.2, 5.0),
    st.lists(st.floats(0, 1 - 2**-53), min_size=DRAWS_PER_SAMPLE, max_size=DRAWS_PER_SAMPLE),
)
def test_a_crop_lies_inside_the_image_and_googles_has_its_area_in_bounds(
    height: int, width: int, area: tuple[float, float], ratio: tuple[float, float], draws: list[float]
):
    ours, googles = (
        crop(height, width, area=area, ratio=ratio, draws=np.array(draws)) for crop in (torchvision_crop, google_crop)
    )
    for box in (ours, googles):
        assert box.height >= 1 and box.width >= 1 and box.top >= 0 and box.left >= 0
        assert box.bottom <= height and box.right <= width
    share = googles.height * googles.width / (height * width)
    assert area[0] * (1 - 1e-6) <= share <= area[1] * (1 + 1e-6) or share == 1


# ---- Google's law


def outcomes(
    height: int, width: int, *, area: tuple[float, float], ratio: tuple[float, float], ratios: int = 1500
) -> Iterator[tuple[int, int, float]]:
    """Every (height, width) of a first attempt with its probability, over a grid of ratios.

    By counting: of all heights that lie between the rounded ones of the area's bounds and leave a width that fits.
    """
    for r in (np.arange(ratios) + 0.5) / ratios * (ratio[1] - ratio[0]) + ratio[0]:
        fits = [h for h in range(1, height + 1) if np.rint(h * r) <= width]
        low, high = (int(np.rint(np.sqrt(bound * height * width / r))) for bound in area)
        heights = [h for h in fits if low <= h <= high] or [fits[-1]]
        for h in heights:
            w = int(np.rint(h * r))
            if h * w < area[0] * height * width:
                h, w = h + 1, int(np.rint((h + 1) * r))
            if h * w > area[1] * height * width:
                h, w = h - 1, int(np.rint((h - 1) * r))
            yield h, w, 1 / ratios / len(heights)


GOOGLE_RATIO = (0.75, 1.33)


@pytest.mark.parametrize(
    ("height", "width", "share"), [(375, 500, 0.343), (500, 500, 0.375), (500, 333, 0.295), (32, 32, 0.378)]
)
def test_googles_crops_follow_the_law_of_tensorflows_op(height: int, width: int, share: float):
    """`share`: the mean of TensorFlow's own boxes, measured (launch/bench/records/google_path.txt)."""
    law = list(outcomes(height, width, area=(0.05, 1.0), ratio=GOOGLE_RATIO))
    assert sum(h * w * p for h, w, p in law) / (height * width) == pytest.approx(share, abs=2e-3)

    many = 8000
    boxes = [
        google_crop(height, width, area=(0.05, 1.0), ratio=GOOGLE_RATIO, draws=draws)
        for draws in uniforms(5, np.arange(many), draws=DRAWS_PER_SAMPLE)
    ]
    taken = np.array([(box.top, box.left, box.height, box.width) for box in boxes])
    for axis in (2, 3):
        probability = np.zeros(max(height, width) + 1)
        for h, w, p in law:
            probability[(h, w)[axis - 2]] += p
        counts = np.bincount(taken[:, axis], minlength=len(probability))
        parts = np.searchsorted(np.cumsum(probability), np.linspace(0, 1, 21)[1:-1])
        expected = np.array([part.sum() for part in np.split(probability, parts)]) * many
        found = np.array([part.sum() for part in np.split(counts, parts)])
        kept = expected > 5
        assert stats.chisquare(found[kept], expected[kept] * found[kept].sum() / expected[kept].sum()).pvalue > 1e-3
    ratios = taken[:, 3] / taken[:, 2]
    if height > 100:  # whole pixels do not show
        assert stats.kstest((ratios - 0.75) / 0.58, "uniform").pvalue > 1e-3
    for axis, side in ((0, height), (1, width)):
        left = side - taken[:, 2 + axis]
        assert (taken[left > 0, axis] < left[left > 0]).all()  # TensorFlow's op never takes the last place
        if height > 100:
            assert stats.kstest((taken[left > 40, axis] + 0.5) / left[left > 40], "uniform").pvalue > 1e-3


def test_after_a_hundred_attempts_the_whole_image_is_taken():
    for seed in range(20):
        box = google_crop(10, 1000, area=(0.05, 1.0), ratio=GOOGLE_RATIO, draws=draws_for(seed))
        assert box == Box(top=0, left=0, height=10, width=1000)


def test_attempts_after_the_tenth_draw_numbers_of_their_own():
    """An attempt fits with probability 0.105, where the ratio is above 1.269: ten would fail for a third of the
    samples, a hundred for one in 65,000."""
    boxes = [
        google_crop(300, 450, area=(0.846, 1.0), ratio=GOOGLE_RATIO, draws=draws)
        for draws in uniforms(9, np.arange(1500), draws=DRAWS_PER_SAMPLE)
    ]
    late = [box for box in boxes if box.height < 450 and box.width < 450]
    assert len(late) >= 1499
    ratios = np.array([box.width / box.height for box in late])
    assert ratios.min() > 1.26 and len(set(ratios)) > 15
    assert abs(np.mean(ratios) - (1.269 + 1.33) / 2) < 0.003


def test_a_place_of_fixed_size_is_any_place():
    places = np.array(
        [
            (box.top, box.left)
            for box in (
                place_of(8, height=10, width=12, draws=draws)
                for draws in uniforms(3, np.arange(3000), draws=DRAWS_PER_SAMPLE)
            )
        ]
    )
    counts = np.zeros((3, 5))
    np.add.at(counts, tuple(places.T), 1)
    assert stats.chisquare(counts.ravel()).pvalue > 1e-3

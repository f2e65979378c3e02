"""Where crops lie: torchvision's law against its own code fed with the same numbers; Google's against a slow reference.

The reference is written from the description of TensorFlow's op (its documentation and kernel), counting in whole
numbers and exact fractions; `launch/bench/google_path.py` compares with the op itself.
"""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from torchvision.transforms import RandomResizedCrop

from data_shards.images.box import Box
from data_shards.images.crops import DRAWS_PER_SAMPLE, torchvision_crop
from data_shards.randomness import uniforms

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
def test_a_crop_lies_inside_the_image(
    height: int, width: int, area: tuple[float, float], ratio: tuple[float, float], draws: list[float]
):
    box = torchvision_crop(height, width, area=area, ratio=ratio, draws=np.array(draws))
    assert box.height >= 1 and box.width >= 1 and box.top >= 0 and box.left >= 0
    assert box.top + box.height <= height and box.left + box.width <= width


@law
@given(st.integers(200, 3000), st.integers(200, 3000), st.integers(0, 2**32))
def test_area_and_ratio_stay_in_their_ranges(height: int, width: int, seed: int):
    """Of pictures whose own shape lies in the range; whole pixels let both miss it by half a pixel a side."""
    height = int(np.clip(height, width * 3 / 4, width * 4 / 3))
    box = torchvision_crop(height, width, area=(0.08, 0.9), ratio=RATIO, draws=draws_for(seed))
    slack = 1 / box.height + 1 / box.width
    assert 0.08 * (1 - slack) <= box.height * box.width / (height * width) <= 0.9 * (1 + slack)
    assert RATIO[0] * (1 - slack) <= box.width / box.height <= RATIO[1] * (1 + slack)


def test_area_is_uniform_ratio_log_uniform_and_the_place_uniform():
    # So large and so small a share that every attempt fits and rounding does not show.
    side, all_draws = 20_000, uniforms(5, np.arange(2000), draws=DRAWS_PER_SAMPLE)
    boxes = [torchvision_crop(side, side, area=(0.05, 0.5), ratio=RATIO, draws=draws) for draws in all_draws]
    height, width = (np.array([getattr(box, name) for box in boxes]) for name in ("height", "width"))
    shares = (height * width / side**2 - 0.05) / 0.45
    shapes = np.log(width / height) / np.log(4 / 3) / 2 + 0.5
    down = np.array([box.top for box in boxes]) / (side - height)
    right = np.array([box.left for box in boxes]) / (side - width)
    for numbers in (shares, shapes, down, right):
        assert stats.kstest(numbers, "uniform").pvalue > 1e-3
    for a, b in ((shares, shapes), (shares, down), (shapes, right), (down, right)):
        assert abs(stats.spearmanr(a, b).statistic) < 0.08

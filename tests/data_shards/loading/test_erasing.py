"""Random erasing is timm's: the same rectangles by the same numbers, one distribution, whatever else is in a batch."""

import random
from typing import Any

import numpy as np
import pytest
import timm.data.random_erasing as timms
import torch
from scipy import stats

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.crops import DRAWS_PER_SAMPLE, ERASE_DRAW
from shardvit.data_shards.loading.erasing import (
    NOISE_PLACES,
    ErasingConfig,
    Erasure,
    draw_erasures,
    normal_numbers,
)
from shardvit.data_shards.order.randomness import uniforms
from shardvit.data_shards.vocabulary import RandomStream


def numbers(count: int, seed: int = 1) -> np.ndarray:
    return uniforms(seed, np.arange(count), draws=DRAWS_PER_SAMPLE)


class Scripted:
    """timm's generator, which hands out our numbers."""

    def __init__(self, row: np.ndarray, config: ErasingConfig) -> None:
        self.first = float(row[ERASE_DRAW])
        words = RandomStream.ERASING, np.uint64(self.first * 2**53)
        self.how_many, *rest = uniforms(*words, draws=1 + config.count * 23)[0].tolist()
        self.of_boxes = [rest[start : start + 23] for start in range(0, len(rest), 23)]
        self.attempt, self.box, self.calls = 0, -1, []

    def random(self) -> float:
        return self.first

    def uniform(self, low: float, high: float) -> float:
        if not self.calls:
            self.box += 1
            self.attempt = 0
        self.calls.append("u")
        value = self.of_boxes[self.box][self.attempt]
        self.attempt += 1
        if self.attempt == 20:
            self.calls = []
        return low + (high - low) * value

    def randint(self, low: int, high: int) -> int:
        if not self.calls and self.box < 0:  # how many
            return low + int(self.how_many * (high - low + 1))
        which = 20 if self.calls[-1] == "u" else 21
        self.calls = [*self.calls, "i"] if which == 20 else []
        return low + int(self.of_boxes[self.box][which] * (high - low + 1))


@pytest.mark.parametrize("size", [8, 32, 224])
@pytest.mark.parametrize("count", [1, 3])
def test_the_rectangles_are_timms_on_the_same_numbers(size: int, count: int, monkeypatch: pytest.MonkeyPatch):
    config, rows = ErasingConfig(0.5, count=count), numbers(120)
    found = draw_erasures(config, rows, image_size=size)
    erasing = timms.RandomErasing(0.5, max_count=count, device="cpu")
    for row, draws in enumerate(rows):
        monkeypatch.setattr(timms, "random", Scripted(draws, config))
        expected = erasing(torch.ones(3, size, size))
        ours = torch.ones(3, size, size)
        for each in found:
            if each.row == row:
                ours[:, each.box.top : each.box.bottom, each.box.left : each.box.right] = 0
        assert torch.equal(ours, expected)
    assert 30 < len({each.row for each in found}) < 90


def test_areas_ratios_and_places_are_distributed_as_timms():
    size = 64
    ours = draw_erasures(ErasingConfig(1.0), numbers(3000), image_size=size)
    random.seed(0)
    erasing = timms.RandomErasing(1.0, device="cpu")
    theirs = []
    for _ in range(3000):
        rows, columns = (erasing(torch.ones(1, size, size))[0] == 0).nonzero().T
        theirs.append((rows.min(), rows.max() - rows.min() + 1, columns.min(), columns.max() - columns.min() + 1))
    boxes = [(each.box.top, each.box.height, each.box.left, each.box.width) for each in ours]
    for mine, timm in zip(zip(*boxes, strict=True), zip(*theirs, strict=True), strict=True):
        assert stats.ks_2samp(mine, [int(each) for each in timm]).pvalue > 1e-3
    assert all(0.3 / 1.4 < each.box.height / each.box.width < 1.4 / 0.3 for each in ours)  # rounded sides


def test_the_share_of_images_and_the_number_of_rectangles():
    found = draw_erasures(ErasingConfig(0.25, count=4), numbers(8000), image_size=96)
    per_image = np.bincount([each.row for each in found], minlength=8000)
    assert stats.binomtest(int((per_image > 0).sum()), 8000, 0.25).pvalue > 1e-3
    assert stats.chisquare(np.bincount(per_image)[1:]).pvalue > 1e-3
    assert stats.kstest([each.noise / NOISE_PLACES for each in found], "uniform").pvalue > 1e-3


def test_an_image_is_erased_alike_in_any_batch():
    config, rows = ErasingConfig(0.6, "pixel", count=2), numbers(40)
    whole = draw_erasures(config, rows, image_size=32)
    parts: list[Erasure] = []
    for start in range(0, 40, 7):
        part = draw_erasures(config, rows[start : start + 7], image_size=32)
        parts += [Erasure(each.row + start, each.box, each.mode, each.noise) for each in part]
    assert tuple(parts) == whole and draw_erasures(None, rows, image_size=32) == ()


def test_the_noise_is_standard_normal_without_a_trace_of_order():
    row = normal_numbers(NOISE_PLACES)
    assert row.dtype == np.float32 and np.isfinite(row).all()
    assert stats.kstest(row, "norm").pvalue > 1e-3
    for lag in (1, 2, 3, 224, 1024):
        assert abs(np.corrcoef(row[:-lag], row[lag:])[0, 1]) < 4 / NOISE_PLACES**0.5
    np.testing.assert_array_equal(normal_numbers(1001), row[:1001])


@pytest.mark.parametrize(
    "wrong", [{"probability": 1.5}, {"probability": 0.5, "count": 0}, {"probability": 0.1, "mode": "x"}]
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any]):
    with pytest.raises(UserError, match="random_erasing"):
        ErasingConfig(**wrong)

"""Colour jitter is torchvision's: the same pixels by the same factors, drawn from the same distributions."""

from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torchvision.transforms import ColorJitter as Torchvisions

from shardvit.data_shards.images.color_jitter import ColorJitter
from shardvit.data_shards.order.randomness import uniforms
from shardvit.data_shards.vocabulary import RandomStream
from tests.data_shards.images.test_rand_augment import draws, picture

STRENGTHS = [(0.3, 0.3, 0.3, 0.0), (0.4, 0.0, 1.5, 0.0), (0.0, 0.0, 0.0, 0.5), (0.2, 0.4, 0.3, 0.1)]


def parameters(strengths: tuple[float, ...], draw: float) -> tuple[list[int], list[float]]:
    """Order and factors by the docstring."""
    numbers = uniforms(RandomStream.COLOR_JITTER, int(draw * 2**53), draws=8)[0]
    theirs = Torchvisions(*strengths)
    ranges = [each or (1, 1) for each in (theirs.brightness, theirs.contrast, theirs.saturation, theirs.hue)]
    factors = [low + (high - low) * u for (low, high), u in zip(ranges, numbers[4:].tolist(), strict=True)]
    return np.argsort(numbers[:4]).tolist(), factors


@pytest.mark.parametrize("strengths", STRENGTHS)
def test_the_pixels_are_torchvisions(strengths: tuple[float, float, float, float], monkeypatch: pytest.MonkeyPatch):
    theirs = Torchvisions(*strengths)
    for draw in draws(25):
        order, factors = parameters(strengths, draw)
        given = [factor if strength else None for factor, strength in zip(factors, strengths, strict=True)]
        monkeypatch.setattr(theirs, "get_params", lambda *ranges, a=order, b=given: (torch.tensor(a), *b))
        before = Image.fromarray(picture())
        expected = np.asarray(theirs(before))
        np.testing.assert_array_equal(np.asarray(ColorJitter(*strengths)(before, draw=draw)), expected)
        assert not np.array_equal(expected, picture())


def test_factors_and_their_order_are_distributed_as_torchvisions():
    strengths = (0.3, 0.4, 1.5, 0.1)
    theirs = Torchvisions(*strengths)
    ours = [parameters(strengths, draw) for draw in uniforms(4, np.arange(2400), draws=1)[:, 0].tolist()]
    torch.manual_seed(0)
    get, ranges = theirs.get_params, (theirs.brightness, theirs.contrast, theirs.saturation, theirs.hue)
    drawn = [get(*ranges) for _ in range(2400)]
    for which in range(4):
        assert stats.ks_2samp([f[which] for _, f in ours], [each[1 + which] for each in drawn]).pvalue > 1e-3
    orders = Counter(tuple(order) for order, _ in ours)
    assert len(orders) == 24 and stats.chisquare(list(orders.values())).pvalue > 1e-3


def test_without_a_strength_the_picture_is_as_before():
    before = Image.fromarray(picture())
    assert ColorJitter()(before, draw=0.4) is before

"""A process that goes on with the next stage draws the numbers of a fresh one."""

from __future__ import annotations

import random

import numpy
import torch

from pipeline.ranks.fresh import FreshProcess


def draw() -> tuple[list[float], float, float]:
    return torch.rand(3).tolist(), random.random(), float(numpy.random.rand())


def test_all_generators_return_to_where_they_were_and_again():
    fresh = FreshProcess()
    first = draw()
    draw()
    torch.manual_seed(7)
    for _ in range(2):
        fresh.again()
        assert draw() == first

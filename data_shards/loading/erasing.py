"""Draw random erasing (arXiv 1708.04896) by timm's law, as a function of the sample's number; the device erases.

A share of images loses one rectangle, or 1 to `count` of them: 2 % to 1/3 of the image's area, divided by their number,
with an aspect ratio log-uniform from 0.3 to 1 / 0.3; after 10 rectangles that do not fit, none. As timm, after
normalisation and before mixing, so that `pixel` is standard normal noise, and `const` the mean colour.

Noise is part of a fixed row of 2^20 normal numbers, from a place that the sample's number chooses: as good as new
numbers within an image, the same on every device, and copied at the speed of memory. Cost: 20 µs an erased image.
"""

import math
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.crops import ERASE_DRAW, Box
from shardvit.data_shards.order.randomness import uniforms
from shardvit.data_shards.vocabulary import EraseMode, RandomStream

AREA, RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)  # timm's
NOISE_PLACES = 1 << 20
_ATTEMPTS = 10
_DRAWS = 2 * _ATTEMPTS + 3  # of a rectangle: area and ratio of each attempt, its place, and its noise's


@dataclass(frozen=True)
class ErasingConfig:
    """Settings of random erasing; UserError for numbers out of range."""

    probability: float
    mode: EraseMode = "const"  # const: 0, the mean; rand: a normal number for each channel; pixel: for each value
    count: int = 1  # most rectangles of an image

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1 or self.count < 1 or self.mode not in get_args(EraseMode):
            raise UserError(
                f"random_erasing: probability {self.probability} must be between 0 and 1, count {self.count} at least "
                f"1, and mode {self.mode!r} one of {', '.join(get_args(EraseMode))}"
            )


@dataclass(frozen=True)
class Erasure:
    """A rectangle of a batch's image, as it is after its flip, and what takes its place."""

    row: int  # of the batch
    box: Box
    mode: EraseMode
    noise: int  # where its numbers begin, below `NOISE_PLACES`


def draw_erasures(config: ErasingConfig | None, draws: NDArray[np.float64], *, image_size: int) -> tuple[Erasure, ...]:
    """Draw a batch's rectangles by its samples' numbers [n, `DRAWS_PER_SAMPLE`]; `image_size`: pixels of a side."""
    if config is None:
        return ()
    chosen = np.flatnonzero(draws[:, ERASE_DRAW] < config.probability)
    seeds = (draws[chosen, ERASE_DRAW] * 2**53).astype(np.uint64)
    numbers = uniforms(RandomStream.ERASING, seeds, draws=1 + config.count * _DRAWS)
    found: list[Erasure] = []
    for row, (how_many, *rest) in zip(chosen.tolist(), numbers.tolist(), strict=True):
        count = 1 + int(how_many * config.count)
        for start in range(0, count * _DRAWS, _DRAWS):
            of_box = rest[start : start + _DRAWS]
            box = _rectangle(of_box, share=1 / count, size=image_size)
            if box is not None:
                found.append(Erasure(row, box, config.mode, noise=int(of_box[-1] * NOISE_PLACES)))
    return tuple(found)


def _rectangle(numbers: list[float], *, share: float, size: int) -> Box | None:
    low, high = (math.log(bound) for bound in RATIO)
    for attempt in range(_ATTEMPTS):
        area = (AREA[0] + (AREA[1] - AREA[0]) * numbers[2 * attempt]) * size**2 * share
        ratio = math.exp(low + (high - low) * numbers[2 * attempt + 1])
        height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if height < size and width < size:
            top, left = (
                int(number * (size - side + 1)) for number, side in zip(numbers[-3:-1], (height, width), strict=True)
            )
            return Box(top=top, left=left, height=height, width=width)
    return None


def normal_numbers(count: int) -> NDArray[np.float32]:
    """Make the first `count` numbers of the row of noise (Box and Muller, 1958)."""
    radius, angle = uniforms(RandomStream.ERASING_NOISE, np.arange(-(-count // 2)), draws=2).T
    both = np.sqrt(-2 * np.log1p(-radius)) * np.stack([np.cos(2 * np.pi * angle), np.sin(2 * np.pi * angle)])
    return both.T.ravel()[:count].astype(np.float32)

"""Draw training crops: two laws of the random-resized ("Inception") crop, and a crop of fixed size.

    torchvision  area uniform between its bounds, ratio log-uniform (RandomResizedCrop); the centre after 10 attempts
    google       TensorFlow's sample_distorted_bounding_box, as called by google-research/vision_transformer and
                 big_vision: ratio uniform, height a uniform integer between those of the area's bounds; the whole
                 image after 100 attempts

google's crops are smaller: for 375 x 500 pixels and areas from 0.05 to 1 they average 0.343 of the image, torchvision's
0.417. Compared with TensorFlow 2.21's own op: `launch/bench/records/google_path.txt`. Cost: 3 µs.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.order.randomness import uniforms
from shardvit.data_shards.vocabulary import RandomStream

# uint8 [height, width, 3], red, green, blue; or float32 [height, width, channels] of `images.channels`
Pixels = NDArray[Any]

_TORCHVISION_ATTEMPTS = 10  # torchvision's RandomResizedCrop
_GOOGLE_ATTEMPTS = 100  # TensorFlow's default
TORCHVISION_RATIO = (3 / 4, 4 / 3)

# A sample's draws: two for each of the first attempts at a crop, two for its place, one for the flip, one for
# RandAugment or AutoAugment, one that keys google's later attempts, one own augmentation, one each for the choice of a
# kernel, the colour jitter and erasing. Append new ones, so that runs keep pixels.
_TOP_DRAW, _LEFT_DRAW, FLIP_DRAW, RAND_AUGMENT_DRAW, _LATER_DRAW, OWN_AUGMENT_DRAW = range(
    2 * _TORCHVISION_ATTEMPTS, 2 * _TORCHVISION_ATTEMPTS + 6
)
KERNEL_DRAW, JITTER_DRAW, ERASE_DRAW = range(OWN_AUGMENT_DRAW + 1, OWN_AUGMENT_DRAW + 4)
DRAWS_PER_SAMPLE = ERASE_DRAW + 1


@dataclass(frozen=True)
class Box:
    """A rectangle of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int

    @property
    def bottom(self) -> int:
        return self.top + self.height

    @property
    def right(self) -> int:
        return self.left + self.width


def torchvision_crop(
    height: int, width: int, *, area: tuple[float, float], ratio: tuple[float, float], draws: NDArray[np.float64]
) -> Box:
    """Draw a box with uniform area and log-uniform width / height; the centre if no attempt fits."""
    log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
    numbers: list[float] = draws.tolist()  # the same bits; Python floats are three times as fast here
    for attempt in range(_TORCHVISION_ATTEMPTS):
        target_area = height * width * (area[0] + (area[1] - area[0]) * numbers[2 * attempt])
        shape = math.exp(log_low + (log_high - log_low) * numbers[2 * attempt + 1])
        crop_width, crop_height = round(math.sqrt(target_area * shape)), round(math.sqrt(target_area / shape))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(numbers[_TOP_DRAW] * (height - crop_height + 1))
            left = int(numbers[_LEFT_DRAW] * (width - crop_width + 1))
            return Box(top=top, left=left, height=crop_height, width=crop_width)
    crop_width = min(width, max(1, round(height * ratio[1])))
    crop_height = min(height, max(1, round(width / ratio[0])))
    return Box(top=(height - crop_height) // 2, left=(width - crop_width) // 2, height=crop_height, width=crop_width)


def google_crop(
    height: int, width: int, *, area: tuple[float, float], ratio: tuple[float, float], draws: NDArray[np.float64]
) -> Box:
    """Draw a box by TensorFlow's law (tensorflow/core/kernels/image/sample_distorted_bounding_box_op.cc).

    The ratio r = width / height is uniform. The area's bounds give heights round(sqrt(area / r)); the upper one is
    lowered until round(height * r) fits the width. The height is a uniform integer between them, the width round(height
    * r), the place uniform among all but the last row and column that fit (the op never takes these). A box whose
    rounded area is out of bounds gains or loses a row; if that does not help, the attempt fails.
    """
    # float32 as in TensorFlow, so that a box of exactly the least area counts
    least, most = (float(np.float32(bound) * np.float32(width) * np.float32(height)) for bound in area)
    numbers: list[float] = draws.tolist()
    for of_ratio, of_height in _attempts(numbers):
        shape = ratio[0] + (ratio[1] - ratio[0]) * of_ratio
        lowest, highest = round(math.sqrt(least / shape)), round(math.sqrt(most / shape))
        if round(highest * shape) > width:
            highest = int((width + 0.5 - 1e-7) / shape)
            highest -= round(highest * shape) > width
        highest = min(highest, height)
        lowest = min(lowest, highest)
        crop_height = lowest + int(of_height * (highest - lowest + 1))
        if crop_height * round(crop_height * shape) < least:
            crop_height += 1
        if crop_height * round(crop_height * shape) > most:
            crop_height -= 1
        crop_width = round(crop_height * shape)
        if least <= crop_height * crop_width <= most and 0 < crop_height <= height and 0 < crop_width <= width:
            top = int(numbers[_TOP_DRAW] * (height - crop_height))
            left = int(numbers[_LEFT_DRAW] * (width - crop_width))
            return Box(top=top, left=left, height=crop_height, width=crop_width)
    return Box(top=0, left=0, height=height, width=width)


CROP_LAWS = {"torchvision": torchvision_crop, "google": google_crop}
"""Random-resized crops by `vocabulary.CropLaw`; a new one also needs its name there."""


def place_of(size: int, *, height: int, width: int, draws: NDArray[np.float64]) -> Box:
    """Place a square of `size` pixels uniformly in an image at least as large."""
    top = int(float(draws[_TOP_DRAW]) * (height - size + 1))
    left = int(float(draws[_LEFT_DRAW]) * (width - size + 1))
    return Box(top=top, left=left, height=size, width=size)


def _attempts(numbers: list[float]) -> Iterator[tuple[float, float]]:
    """Yield two numbers for each attempt; from the eleventh on, from a generator keyed by one of the draws."""
    for attempt in range(_TORCHVISION_ATTEMPTS):
        yield numbers[2 * attempt + 1], numbers[2 * attempt]
    seed = int(numbers[_LATER_DRAW] * 2**53)  # all its bits
    later = uniforms(RandomStream.CROP_ATTEMPTS, seed, draws=2 * (_GOOGLE_ATTEMPTS - _TORCHVISION_ATTEMPTS))[0]
    yield from zip(later[::2].tolist(), later[1::2].tolist(), strict=True)

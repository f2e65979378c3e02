"""Pixels of any size -> uint8 squares, for training (random crop and flip) and for evaluation (squash).

Randomness comes in as numbers, drawn by `randomness.uniforms` from (seed, epoch, sample): the same sample looks the
same on any number of processes and workers and after a restart. Pixels stay uint8 until they are on the device
(a quarter of the bytes through every queue); flip and normalisation happen there, per batch: see `device`.

Resizing is torch's antialiased bilinear kernel for uint8 (57 dB against a float reference). Google's code resizes
without antialiasing; at the sizes of training crops the two differ by less than the crop's randomness.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]

# Two numbers for the size and shape of each attempt at a crop, two for its place, one for the flip.
_CROP_ATTEMPTS = 10  # as torchvision's RandomResizedCrop; TensorFlow's op tries 100 times
DRAWS_PER_SAMPLE = 2 * _CROP_ATTEMPTS + 3


@dataclass(frozen=True)
class Box:
    """A rectangle of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class TrainTransform:
    """Random-resized crop ("Inception crop") and mirror flip.

    Attributes:
        image_size: side of the square that comes out, in pixels.
        crop_area: smallest and largest share of the image's area that a crop takes (Google: 0.05 to 1).
        crop_ratio: smallest and largest width/height of a crop (Google: 3/4 to 4/3).
        flip: share of the samples that are mirrored (0.5, or 0 where left and right have a meaning).
    """

    image_size: int
    crop_area: tuple[float, float] = (0.05, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5

    def __call__(self, image: Pixels, *, draws: NDArray[np.float64]) -> tuple[Pixels, bool]:
        """One sample: uint8 [H, W, 3] and `DRAWS_PER_SAMPLE` uniforms -> uint8 [size, size, 3], and "mirror it"."""
        box = random_crop(*image.shape[:2], area=self.crop_area, ratio=self.crop_ratio, draws=draws)
        crop = image[box.top : box.top + box.height, box.left : box.left + box.width]
        return resize(crop, image_size=self.image_size), bool(draws[-1] < self.flip)


@dataclass(frozen=True)
class EvalTransform:
    """The whole image squashed to the square, as google-research/vision_transformer evaluates."""

    image_size: int

    def __call__(self, image: Pixels) -> Pixels:
        """One sample: uint8 [H, W, 3] -> uint8 [size, size, 3]."""
        return resize(image, image_size=self.image_size)


def random_crop(
    height: int,
    width: int,
    *,
    area: tuple[float, float],
    ratio: tuple[float, float],
    draws: NDArray[np.float64],
) -> Box:
    """The box of a random-resized crop: area uniform, ratio log-uniform; the centre where no attempt fits.

    Args:
        height: of the image, in pixels.
        width: of the image, in pixels.
        area: range of the crop's share of the image's area.
        ratio: range of width / height.
        draws: at least 2 * attempts + 2 uniform numbers in [0, 1).
    """
    log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
    for attempt in range(_CROP_ATTEMPTS):
        target_area = height * width * (area[0] + (area[1] - area[0]) * draws[2 * attempt])
        shape = math.exp(log_low + (log_high - log_low) * draws[2 * attempt + 1])
        crop_width, crop_height = round(math.sqrt(target_area * shape)), round(math.sqrt(target_area / shape))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(draws[2 * _CROP_ATTEMPTS] * (height - crop_height + 1))
            left = int(draws[2 * _CROP_ATTEMPTS + 1] * (width - crop_width + 1))
            return Box(top=top, left=left, height=crop_height, width=crop_width)
    crop_width = min(width, max(1, round(height * ratio[1])))
    crop_height = min(height, max(1, round(width / ratio[0])))
    return Box(top=(height - crop_height) // 2, left=(width - crop_width) // 2, height=crop_height, width=crop_width)


def resize(image: Pixels, *, image_size: int) -> Pixels:
    """Antialiased bilinear resize of uint8 [H, W, 3] to [size, size, 3]."""
    if image.shape[:2] == (image_size, image_size):
        return image
    import torch

    # This order of indexing keeps the strides that torch recognises as channels-last, which is 2.6 times faster.
    pixels = torch.from_numpy(np.ascontiguousarray(image))[None].permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(
        pixels, size=(image_size, image_size), mode="bilinear", antialias=True, align_corners=False
    )
    return resized[0].permute(1, 2, 0).numpy()

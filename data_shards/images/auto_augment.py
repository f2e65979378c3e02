"""timm's AutoAugment, RandAugment and 3-Augment by its own strings, as functions of one number.

    original, v0         AutoAugment's policy for ImageNet (arXiv 1805.09501), and the TPU EfficientNet's; originalr and
                         v0r posterize more as the magnitude grows. -mstd0.5: noise of the magnitudes
    3a                   3-Augment (DeiT III, arXiv 2204.07118): solarize at 128, grey, or a Gaussian blur of radius 0.1
                         to 2, equally often; DeiT III adds a colour jitter of 0.3
    rand-m9-mstd0.5-inc1 RandAugment: n operations (2), each with probability p (0.5), at magnitude m (10) with noise of
                         deviation mstd (0), at most mmax (10); inc1: all grow stronger with m; t: another set of them

Bit for bit timm's transform on the mirrored image, with generators of `random` and numpy seeded from the number. As
timm's, it fills uncovered pixels with the mean colour and interpolates as the crop does. Unlike timm, it posterizes to
black where no bit is kept (the noise makes that 1 image in 660 of rand-m9-mstd0.5-inc1), which Pillow refuses.

`rand_augment` has Google's ranges. Cost at 224 pixels: 0.1 to 1.4 ms an operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from shardvit.data_shards.images.rand_augment import seed_timm, timms_operations

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class AutoAugment:
    """A policy by timm's string (checked by the recipe)."""

    policy: str
    interpolation: str = "random"  # of geometric operations: bilinear, bicubic, or one of them each time
    fill: tuple[int, ...] = (128, 128, 128)  # of uncovered pixels

    def __call__(self, picture: Image.Image, *, draw: float) -> Image.Image:
        """Augment an RGB picture; `draw` is a uniform number in [0, 1)."""
        seed_timm(int(draw * 2**53))  # all its bits
        return _timms(self)(picture)


@cache
def _timms(augment: AutoAugment) -> Callable[[Image.Image], Image.Image]:
    """Make timm's transform as its `create_transform` does."""
    from PIL import Image

    options: dict[str, Any] = {"img_mean": augment.fill}  # shifts are shares of the side in all of these policies
    if augment.interpolation != "random":
        options["interpolation"] = Image.Resampling[augment.interpolation.upper()]
    timm = timms_operations()
    make = timm.rand_augment_transform if augment.policy.startswith("rand") else timm.auto_augment_transform
    return make(augment.policy, options)

"""Colour jitter by torchvision's law (`ColorJitter`), which timm and DeiT use, as a function of one number.

Brightness, contrast, saturation and hue change in random order, each by a uniform factor: 1 - x to 1 + x (at least 0),
and for the hue a share of the circle from -x to x. Bit for bit torchvision's on the same factors, as both are Pillow's.
Cost at 224 pixels: 0.1 to 0.2 ms for each of the first three, 1.5 ms for the hue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardvit.data_shards.order.randomness import uniforms
from shardvit.data_shards.vocabulary import RandomStream

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class ColorJitter:
    """Greatest change of brightness, contrast, saturation and hue; 0: none."""

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0  # at most 0.5, half the circle

    def __call__(self, picture: Image.Image, *, draw: float) -> Image.Image:
        """Jitter an RGB picture; `draw` is a uniform number in [0, 1)."""
        from PIL import ImageEnhance

        enhance = ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color
        most = self.brightness, self.contrast, self.saturation, self.hue
        draws = uniforms(RandomStream.COLOR_JITTER, int(draw * 2**53), draws=8)[0]
        for which in np.argsort(draws[:4], kind="stable").tolist():
            if not most[which]:
                continue
            low = -most[which] if which == 3 else max(0.0, 1 - most[which])
            high = most[which] if which == 3 else 1 + most[which]
            factor = low + (high - low) * float(draws[4 + which])
            picture = _turned(picture, factor) if which == 3 else enhance[which](picture).enhance(factor)
        return picture


def _turned(picture: Image.Image, share: float) -> Image.Image:
    from PIL import Image

    hue, *others = picture.convert("HSV").split()
    turned = np.asarray(hue) + np.uint8(int(share * 255) % 256)  # wraps around
    return Image.merge("HSV", (Image.fromarray(turned), *others)).convert("RGB")

"""The two types that decoding, cropping and mixing share: pixels, and a rectangle of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]  # [height, width, 3], red, green, blue


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

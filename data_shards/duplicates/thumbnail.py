"""Thumbnails, and windows of them: what the hash and the comparison look at."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

THUMBNAIL_PIXELS = 32  # of each side, whatever the image's shape


def thumbnail(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Greys or colours, uint8 [height, width] or [height, width, 3], squeezed to 32 x 32 pixels."""
    from PIL import Image

    # Pillow's bilinear filter averages where it reduces; to enlarge, bicubic comes nearer to what was reduced.
    is_large = min(pixels.shape[:2]) >= THUMBNAIL_PIXELS
    resampling = Image.Resampling.BILINEAR if is_large else Image.Resampling.BICUBIC
    return np.asarray(Image.fromarray(pixels).resize((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS), resampling))


def sampling(low: float, high: float, samples: int) -> NDArray[np.float64]:
    """The matrix [samples, 32] that reads a window of one axis, in shares of it, by linear interpolation."""
    place = (low + (high - low) * (np.arange(samples) + 0.5) / samples) * THUMBNAIL_PIXELS - 0.5
    left = np.clip(np.floor(place).astype(int), 0, THUMBNAIL_PIXELS - 2)
    weight = np.clip(place - left, 0, 1)
    matrix = np.zeros((samples, THUMBNAIL_PIXELS))
    matrix[np.arange(samples), left] = 1 - weight
    matrix[np.arange(samples), left + 1] = weight
    return matrix

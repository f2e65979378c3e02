"""Thumbnails, and windows of them: what the hash and the alignment look at."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

THUMBNAIL_PIXELS = 32  # of each side, whatever the image's shape


def thumbnail(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Greys, uint8 [height, width], squeezed to 32 x 32 pixels."""
    from PIL import Image

    # Pillow's bilinear filter averages where it reduces; to enlarge, bicubic comes nearer to what was reduced.
    is_large = min(pixels.shape[:2]) >= THUMBNAIL_PIXELS
    resampling = Image.Resampling.BILINEAR if is_large else Image.Resampling.BICUBIC
    return np.asarray(Image.fromarray(pixels).resize((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS), resampling))


def sampling(low: Any, high: Any, samples: int) -> NDArray[np.float32]:
    """The matrices [..., samples, 32] that read windows of one axis, in shares of it, by linear interpolation.

    `low` and `high`, [...], broadcast; beyond the edge the last pixel is repeated.
    """
    low, high = np.asarray(low, np.float32)[..., None], np.asarray(high, np.float32)[..., None]
    shares = (np.arange(samples, dtype=np.float32) + 0.5) / samples
    places = np.clip((low + (high - low) * shares) * THUMBNAIL_PIXELS - 0.5, 0, THUMBNAIL_PIXELS - 1)
    distances = np.abs(places[..., None] - np.arange(THUMBNAIL_PIXELS, dtype=np.float32))
    return np.maximum(0, 1 - distances)

"""Encoded image bytes -> RGB pixels.

JPEGs go through simplejpeg (libjpeg-turbo, about 1.25 times Pillow's speed), everything else, and the JPEGs that it
declines (CMYK and the like), through Pillow. Grey becomes three equal channels; transparency is dropped; 16 bits
become 8. An orientation tag in the file is not applied: the pixels are taken as they are stored, as in Google's code.

This does not crop while decoding; the whole image is decoded.
"""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray

_JPEG_MAGIC = b"\xff\xd8\xff"


def decode_rgb(data: bytes) -> NDArray[np.uint8]:
    """Decode one image to uint8 [height, width, 3].

    Raises:
        ValueError: the bytes are no readable image.
    """
    if data[:3] == _JPEG_MAGIC:
        import simplejpeg

        try:
            return simplejpeg.decode_jpeg(data, colorspace="RGB")
        except ValueError:
            pass  # CMYK, or damaged: Pillow reads the first and gives the reason for the second
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            return np.array(_eight_bit(image).convert("RGB"))  # a copy: torch wants memory that it may write to
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"not a readable image ({error})") from error


def _eight_bit(image):  # noqa: ANN001, ANN202 - Pillow is imported inside the function above
    if image.mode.startswith("I;16"):  # Pillow would clip 16-bit grey at 255 instead of scaling it
        return image.point(lambda value: value / 256).convert("L")
    return image

"""Encoded image bytes -> RGB pixels.

JPEGs go through simplejpeg (libjpeg-turbo, about 1.25 times Pillow's speed), everything else, and the JPEGs that it
declines, through Pillow. Grey becomes three equal channels; transparency is dropped; 16 bits become 8. An orientation
tag in the file is not applied: the pixels are taken as they are stored, as in Google's code.

This does not crop while decoding; the whole image is decoded.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import Image

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
            pass  # damaged: Pillow forgives more, and gives the reason where it does not
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            return np.array(_eight_bit(image).convert("RGB"))  # a copy: torch wants memory that it may write to
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"not a readable image ({error})") from error


def _eight_bit(image: Image.Image) -> Image.Image:
    """An image whose `convert("RGB")` neither clips nor warns."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        # Grey of 16 bits; Pillow would clip it at 255 instead of scaling it.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise OSError(f"pixels of mode {image.mode} have no fixed range; convert them to 8 bits")
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA")  # the same colours; straight to RGB, Pillow warns
    return image

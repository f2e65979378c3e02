"""Pillow's part of decoding: every format that is no plain JPEG, and the last word on damaged ones.

The whole image is decoded even for a box. Policies (palette, 16 bits, transparency): see `decode`. Only formats that
Pillow decodes by itself are let in; its EPS reader, for one, starts Ghostscript on the file.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from data_shards.errors import UnreadableImage
from data_shards.images.box import Box, Pixels

if TYPE_CHECKING:
    from PIL import Image

# Most frequent first: Pillow asks them in turn, and loads the plugins of the last four only if it gets there.
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "AVIF", "JPEG2000")


@dataclass(frozen=True)
class PillowImage:
    """An image whose header Pillow has read."""

    image: Image.Image

    def pixels(self, box: Box) -> Pixels:
        """uint8 [h, w, 3] of a box inside the image.

        Raises:
            UnreadableImage: the image is damaged, or its pixels have no fixed range.
        """
        with _refusals():
            part = _eight_bit(self.image).crop((box.left, box.top, box.right, box.bottom))
            return np.array(part.convert("RGB"))  # a copy: torch wants memory that it may write to


def open_with_pillow(data: bytes) -> PillowImage:
    """Read the header of one image.

    Raises:
        UnreadableImage: the bytes are no image, or one of more pixels than Pillow allows.
    """
    from PIL import Image

    with _refusals():
        return PillowImage(Image.open(io.BytesIO(data), formats=_FORMATS))


@contextmanager
def _refusals() -> Iterator[None]:
    from PIL import UnidentifiedImageError

    try:
        yield
    except MemoryError:
        raise  # the machine's fault, not the image's
    except UnidentifiedImageError as error:  # its own message has a memory address in it
        raise UnreadableImage("not a readable image (of no format that is known)") from error
    except Exception as error:  # Pillow's parsers let out whatever the bytes make them run into
        raise UnreadableImage(f"not a readable image ({str(error) or type(error).__name__})") from error


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

"""Decode images: the size first, pixels of the whole image or of a box on demand.

A random-resized crop needs a third of an average photograph, so where nvImageCodec is installed only the crop's region
of a JPEG is decoded. All CPU decoders are builds of libjpeg-turbo with its exact transform and smooth chroma. Their
pixels are bit-identical (55 dB is the promise), also to TensorFlow's with dct_method="INTEGER_ACCURATE"; Google's code
uses TensorFlow's fast transform, 43 to 45 dB away. Kinds of images, with any decoder:

    plain JPEG: 8 bits, Huffman-coded, grey or three colours   the requested decoder
    CMYK JPEG, arithmetic coding, lossless                     Pillow: libjpeg's plain conversion to RGB, or refused
    12-bit JPEG                                                refused (Pillow reads none)
    PNG, WebP, GIF, BMP, TIFF, PPM, AVIF, JPEG 2000            Pillow, the first frame; no other format is tried
    grey                                                       three equal channels
    palette, transparency                                      its colours; alpha is dropped, not blended
    16 bits                                                    the upper 8
    integers or floats without a fixed range                   refused
    orientation tag                                            not applied, as in Google's code
    more pixels than data.max_image_pixels                     refused before decoding
    truncated (no end marker)                                  refused, whatever the crop, unless enough other bytes
                                                               follow for libjpeg to take them for the rest
    damaged in the middle, but libjpeg continues               as libjpeg repairs it, with a line on stderr
    bytes after the end                                        ignored

The crop does not affect whether a JPEG can be read, with one exception: damage below the crop that spells a marker
after which libjpeg cannot continue. Cost: 3 µs for the size; then 1.0 ms for a training crop of an ImageNet photograph
(0.88 in libjpeg-turbo itself), a twelfth less by 16 in one call, or 1.1 (simplejpeg) or 1.4 (Pillow) for the whole
photograph. Two thirds go to Huffman codes above the crop's end, which cannot be skipped.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.errors import UnreadableImage, UserError
from shardvit.data_shards.images import decode_nvimgcodec
from shardvit.data_shards.images.crops import Box, Pixels
from shardvit.data_shards.vocabulary import MOST_PIXELS, USUAL_MOST_PIXELS, DecoderName

if TYPE_CHECKING:
    from PIL import Image

_JPEG_MAGIC = b"\xff\xd8\xff"
_END_OF_IMAGE = b"\xff\xd9"
_FRAMES = frozenset({0xC0, 0xC1, 0xC2})  # start of frame: baseline, extended and progressive, Huffman-coded
_OTHER_FRAMES = frozenset(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}  # lossless, hierarchical, arithmetic-coded
_START_OF_SCAN, _FILL = 0xDA, 0xFF

# Smaller images go to simplejpeg even for a region: 0.7 of the time at 32 pixels a side.
_REGION_PAYS_PIXELS = 96 * 96

# Formats that Pillow decodes itself (its EPS reader runs Ghostscript on the file), most frequent first: it tries
# them in turn, and loads the plugins of the last four only if it gets there.
_PILLOW_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "AVIF", "JPEG2000")


@dataclass(frozen=True)
class PixelLimit:
    """Most pixels an image may have, and the recipe's key or flag that says so."""

    pixels: int = USUAL_MOST_PIXELS
    name: str = "data.max_image_pixels"

    def __post_init__(self) -> None:
        if not 1 <= self.pixels <= MOST_PIXELS:
            raise UserError(f"{self.name}: it is {self.pixels}; give 1 to {MOST_PIXELS:,}, which is Pillow's own limit")


USUAL_LIMIT = PixelLimit()


@dataclass(frozen=True)
class EncodedImage:
    """An image not decoded yet; sizes in pixels. Call `pixels`: `decode` needs a box inside the image."""

    height: int
    width: int
    decode: Callable[[Box], Pixels]
    jpeg: bytes = b""  # a plain JPEG, whose boxes `decode_together` may take
    decoder: DecoderName = "auto"  # of that
    dtype: str = "uint8"  # in the file; of which `images.channels` makes float32

    def pixels(self, box: Box | None = None) -> Pixels:
        """Decode the box or the whole image: contiguous uint8 [height, width, 3], or of `images.channels` float32
        [height, width, channels]; UnreadableImage if damaged."""
        box = box or Box(top=0, left=0, height=self.height, width=self.width)
        assert box.top >= 0 and box.left >= 0 and box.bottom <= self.height and box.right <= self.width
        assert box.height > 0 and box.width > 0
        return self.decode(box)


def read_image(data: bytes, *, decoder: DecoderName = "auto", limit: PixelLimit = USUAL_LIMIT) -> EncodedImage:
    """Read an image's header; no pixels are allocated yet.

    `decoder` is for JPEGs: auto is nvImageCodec on the CPU where it is installed and decoding a region pays, otherwise
    simplejpeg; gpu is nvImageCodec on the rank's GPU. Pillow takes what they decline. UnreadableImage if it is not an
    image or exceeds `limit`; UserError if the decoder does not work here.
    """
    require_decoder(decoder)
    header = _read_header(data) if data[:3] == _JPEG_MAGIC else None
    if decoder == "pillow" or header is None or not header.is_plain or not header.is_complete:
        return of_pillow(open_with_pillow(data), limit=limit)
    check_size(header.height, header.width, limit)
    return EncodedImage(header.height, header.width, partial(_decode, data, header, decoder), data, decoder)


def decode_together(parts: Sequence[tuple[EncodedImage, Box]]) -> list[Pixels | None]:
    """Decode many images' boxes to what `pixels` returns, in one call for those that nvImageCodec takes.

    None for the others, and for those that it declines: call their `pixels`. No image affects another's.
    """
    found: list[Pixels | None] = [None] * len(parts)
    devices = [
        _device(image.decoder, height=image.height, width=image.width, box=box) if image.jpeg else None
        for image, box in parts
    ]
    for device in ("cpu", "gpu"):
        places = [place for place, each in enumerate(devices) if each == device]
        wanted = [(parts[place][0].jpeg, parts[place][1]) for place in places]
        decoded = decode_nvimgcodec.decode_jpegs(wanted, device=device) if wanted else []
        for place, pixels in zip(places, decoded, strict=True):
            found[place] = pixels
    return found


def of_pillow(image: Image.Image, *, limit: PixelLimit = USUAL_LIMIT) -> EncodedImage:
    """Take an opened image, with `read_image`'s rules for colours and sizes."""
    check_size(image.height, image.width, limit)
    return EncodedImage(image.height, image.width, decode=partial(_pillow_pixels, image))


def read_reduced(
    data: bytes, *, least_pixels: int, colours: Literal["RGB", "GRAY"], limit: PixelLimit = USUAL_LIMIT
) -> tuple[int, int, NDArray[np.uint8]]:
    """Read height, width and pixels, perhaps reduced: uint8 [height', width', 3], or [height', width'] for greys.

    JPEGs are decoded at 1/2 to 1/8 of their size if both sides keep `least_pixels`: 0.9 ms. Raises UnreadableImage.
    """
    header = _read_header(data) if data[:3] == _JPEG_MAGIC else None
    if header is not None and header.is_plain and header.is_complete:
        check_size(header.height, header.width, limit)
        import simplejpeg

        try:
            reduced = simplejpeg.decode_jpeg(data, colorspace=colours, min_height=least_pixels, min_width=least_pixels)
            return header.height, header.width, reduced if colours == "RGB" else reduced[..., 0]
        except ValueError:
            pass
    opened = open_with_pillow(data)
    height, width = opened.height, opened.width
    check_size(height, width, limit)
    with refusals():
        opened.draft("L" if colours == "GRAY" else "RGB", (least_pixels, least_pixels))
        pixels = _eight_bit(opened).convert("RGB")
        return height, width, np.array(pixels if colours == "RGB" else pixels.convert("L"))


def peek_size(start: bytes) -> tuple[int, int] | None:
    """Read height and width from an image's first bytes, without decoding; None if they do not tell."""
    header = _read_header(start) if start[:3] == _JPEG_MAGIC else None
    if header is not None:
        return header.height, header.width
    try:
        opened = open_with_pillow(start)
    except UnreadableImage:
        return None
    return opened.height, opened.width


@cache
def require_decoder(decoder: DecoderName) -> None:
    """UserError unless the decoder is installed and works here; cached for the life of the process."""
    complaint = None
    if decoder in ("nvimgcodec", "gpu"):
        complaint = decode_nvimgcodec.complaint("gpu" if decoder == "gpu" else "cpu")
    elif decoder == "simplejpeg" and not find_spec("simplejpeg"):
        complaint = "the package simplejpeg is not installed"
    if complaint:
        raise UserError(f"decoder {decoder}: {complaint}; set data.decoder to auto, or fix that")


@dataclass(frozen=True)
class _Header:
    height: int
    width: int
    is_plain: bool  # every decoder reads it, with the same colours
    is_complete: bool  # it has an end marker


def _read_header(data: bytes) -> _Header | None:
    """Walk a JPEG's segments up to the frame's; None for anything odd, which is left to Pillow."""
    position = 2
    try:
        while True:
            if data[position] != _FILL:
                return None
            marker = data[position + 1]
            if marker == _FILL:
                position += 1
            elif marker in _FRAMES or marker in _OTHER_FRAMES:
                break
            elif marker < 0xC0 or 0xD0 <= marker <= _START_OF_SCAN:
                return None  # no segment with a length, or a scan without a frame
            else:
                position += 2 + (data[position + 2] << 8 | data[position + 3])
        precision, components = data[position + 4], data[position + 9]
        height, width = data[position + 5] << 8 | data[position + 6], data[position + 7] << 8 | data[position + 8]
    except IndexError:
        return None
    return _Header(
        height=height,
        width=width,
        is_plain=marker in _FRAMES and precision == 8 and components in (1, 3) and height > 0 and width > 0,
        # Coded data contains no end marker, so one after the frame's header ends the image and the rest is padding.
        # Thumbnails, which have end markers too, come before.
        is_complete=data.endswith(_END_OF_IMAGE) or data.rfind(_END_OF_IMAGE, position) >= 0,
    )


def check_size(height: int, width: int, limit: PixelLimit) -> None:
    """UnreadableImage if an image has more pixels than `limit`."""
    if height * width > limit.pixels:
        raise UnreadableImage(f"it has {width} x {height} pixels, more than the {limit.pixels:,} of {limit.name}")


def _decode(data: bytes, header: _Header, decoder: DecoderName, box: Box) -> Pixels:
    """Decode a plain JPEG's box; if the decoder declines, Pillow tolerates more or gives the reason."""
    device = _device(decoder, height=header.height, width=header.width, box=box)
    pixels = decode_nvimgcodec.decode_jpegs([(data, box)], device=device)[0] if device else _simplejpeg(data, box)
    return _pillow_pixels(open_with_pillow(data), box) if pixels is None else pixels


def _device(decoder: DecoderName, *, height: int, width: int, box: Box) -> decode_nvimgcodec.Device | None:
    """Where nvImageCodec decodes this box of a plain JPEG; None if simplejpeg does."""
    if decoder == "gpu":
        return "gpu"
    is_region = (box.height, box.width) != (height, width) and height * width > _REGION_PAYS_PIXELS
    pays = decoder == "auto" and is_region and decode_nvimgcodec.complaint("cpu") is None
    return "cpu" if pays or decoder == "nvimgcodec" else None


def _simplejpeg(data: bytes, box: Box) -> Pixels | None:
    import simplejpeg

    try:
        whole = simplejpeg.decode_jpeg(data, colorspace="RGB")
    except ValueError:
        return None
    return np.ascontiguousarray(whole[box.top : box.bottom, box.left : box.right])


def open_with_pillow(data: bytes) -> Image.Image:
    """Read the header; UnreadableImage if it is not an image or has more pixels than Pillow allows."""
    from PIL import Image

    with refusals():
        return Image.open(io.BytesIO(data), formats=_PILLOW_FORMATS)


def _pillow_pixels(image: Image.Image, box: Box) -> Pixels:
    with refusals():
        part = _eight_bit(image).crop((box.left, box.top, box.right, box.bottom))
        return np.array(part.convert("RGB"))  # a copy: torch wants writable memory


@contextmanager
def refusals() -> Iterator[None]:
    """Raise what a decoder says of damaged bytes as UnreadableImage."""
    from PIL import UnidentifiedImageError

    try:
        yield
    except (MemoryError, UnreadableImage):
        raise  # the latter says all; the former is the machine's fault, not the image's
    except UnidentifiedImageError as error:  # its message has a memory address in it
        raise UnreadableImage("not a readable image (of no known format)") from error
    except Exception as error:  # damaged bytes can make Pillow raise anything
        raise UnreadableImage(f"not a readable image ({str(error) or type(error).__name__})") from error


def _eight_bit(image: Image.Image) -> Image.Image:
    """Prepare an image so that `convert("RGB")` neither clips nor warns."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        # 16-bit grey; Pillow would clip it at 255 instead of scaling it.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise OSError(f"pixels of mode {image.mode} have no fixed range; convert them to 8 bits")
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA")  # the same colours; straight to RGB, Pillow warns
    return image

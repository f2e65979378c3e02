"""Read images as they are in their files: 1 to 16 channels of 8 or 16 bits or of float32, for `model.channels`.

Pixels are float32 [height, width, channels], integers as shares of their type's range (x / 255, x / 65535), floats as
they are: a batch is of one type, whatever its files are, and sets of 8 and of 16 bits can be mixed. Which files:

    npy              [H, W, C] or [H, W] of uint8, uint16 or float32, of either byte order
    TIFF             the first page, pixels or planes (`tiff`); palette, YCbCr and JPEG-in-TIFF as Pillow decodes them
    PNG              8 bits, with alpha as a further channel; 16 bits of grey (of colours: refused, Pillow reads 8)
    JPEG, WebP, ...  Pillow: grey is 1 channel, colour 3, CMYK 4; alpha is a channel; a palette gives its colours
    another number of channels than was asked for, NaN or infinity anywhere           refused, whatever the crop
    more pixels than the limit, or a header that promises more than the file has      refused before decoding

No pickle is read. Costs a decode of the whole image (npy: of the crop alone), 4 bytes a value, and 0.4 ns a value to
convert. Does not apply orientation tags, colour profiles, scales or "no data" values.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.errors import UnreadableImage
from shardvit.data_shards.images.crops import Box
from shardvit.data_shards.images.decode import (
    USUAL_LIMIT,
    EncodedImage,
    PixelLimit,
    check_size,
    open_with_pillow,
    read_image,
    refusals,
)
from shardvit.data_shards.images.tiff import TIFF_MAGICS, read_tiff
from shardvit.data_shards.vocabulary import DecoderName

if TYPE_CHECKING:
    from PIL import Image

NPY_MAGIC = b"\x93NUMPY"
_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_PILLOW_CHANNELS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4, "I;16": 1, "I;16B": 1}
_RANGES = {"uint8": 255, "uint16": 65535, "float32": 1}
_SHOWN_DEVIATIONS = 2.0  # about the mean, from black to white


def open_image(
    data: bytes, *, channels: int = 0, decoder: DecoderName = "auto", limit: PixelLimit = USUAL_LIMIT
) -> EncodedImage:
    """Read a header as colours of 8 bits (`channels` 0: `decode.read_image`), or as so many channels."""
    if channels:
        return read_channels(data, channels=channels, limit=limit)
    return read_image(data, decoder=decoder, limit=limit)


def open_to_look(data: bytes, *, channels: int = 0, limit: PixelLimit = USUAL_LIMIT) -> EncodedImage:
    """Open as `open_image` does, or an array or TIFF that is no colour image as it is, for tars without a manifest."""
    try:
        return open_image(data, channels=channels, limit=limit)
    except UnreadableImage:
        if channels or not (data.startswith(NPY_MAGIC) or data[:4] in TIFF_MAGICS):
            raise
    return read_channels(data, channels=None, limit=limit)


def read_channels(data: bytes, *, channels: int | None, limit: PixelLimit = USUAL_LIMIT) -> EncodedImage:
    """Read a header; UnreadableImage if it is damaged, exceeds `limit` or has other channels (None: any number)."""
    with refusals():
        if data.startswith(NPY_MAGIC):
            found = _npy(data)
        elif data[:4] in TIFF_MAGICS and (tiff := read_tiff(data)) is not None:
            found = tiff.height, tiff.width, tiff.channels, tiff.dtype, tiff.read
        elif data.startswith(_PNG_MAGIC) and data[24:25] == b"\x10" and data[25:26] != b"\0":
            raise OSError("a PNG of 16 bits in colour, of which Pillow reads the upper 8: write it as TIFF or npy")
        else:
            found = _by_pillow(open_with_pillow(data))
    height, width, number, dtype, read = found
    check_size(height, width, limit)
    if number != channels and channels is not None:
        raise UnreadableImage(f"it has {number} channels, and {channels} are asked for")
    return EncodedImage(height, width, partial(_decoded, read, dtype), dtype=dtype)


_Read = Callable[[], NDArray[Any]]  # -> [H, W, C] of the file's type


def _decoded(read: _Read, dtype: str, box: Box) -> NDArray[np.float32]:
    with refusals():
        whole = read()
        if dtype == "float32" and not np.isfinite(whole).all():
            raise OSError("it has NaN or infinity in it")
        part = whole[box.top : box.bottom, box.left : box.right].astype(np.float32, order="C")  # a copy, in our order
        if (top := _RANGES[dtype]) != 1:
            part /= np.float32(top)
        return part


def _npy(data: bytes) -> tuple[int, int, int, str, _Read]:
    """Read the header as NumPy does, which evaluates literals alone; the values stay where they are."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = header(file)
    name = dtype.newbyteorder("=").name
    if name not in _RANGES or dtype.fields is not None:
        raise OSError(f"an array of {name[:40]}, where uint8, uint16 or float32 can be")
    if len(shape) not in (2, 3) or min(shape) < 1:
        raise OSError(f"an array of shape {list(shape)[:8]}, where [height, width, channels] is")
    height, width, channels = (*shape, 1)[:3]
    if len(data) - file.tell() < height * width * channels * dtype.itemsize:
        raise OSError(f"its header promises {list(shape)}, more than the file has")
    values = np.frombuffer(data, dtype, height * width * channels, file.tell())
    array = values.reshape((height, width, channels), order="F" if is_fortran else "C")
    return height, width, channels, name, lambda: array


def _by_pillow(image: Image.Image) -> tuple[int, int, int, str, _Read]:
    mode = image.mode
    if mode == "P":
        mode = "RGBA" if "transparency" in image.info else "RGB"
    elif mode == "1":
        mode = "L"
    if mode not in _PILLOW_CHANNELS:
        raise OSError(f"pixels of mode {mode} have no fixed range")
    channels, dtype = _PILLOW_CHANNELS[mode], "uint16" if mode.startswith("I;16") else "uint8"

    def read() -> NDArray[Any]:
        return np.asarray(image if image.mode == mode else image.convert(mode)).reshape(image.height, image.width, -1)

    return image.height, image.width, channels, dtype, read


def of_array(array: NDArray[Any], *, channels: int) -> EncodedImage:
    """Take an array [H, W, C] or [H, W] in memory by the rules for npy; UnreadableImage for any other."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return read_channels(file.getvalue(), channels=channels)


def as_colours(
    pixels: NDArray[Any], *, mean: Sequence[float], std: Sequence[float], shown: Sequence[int] = ()
) -> NDArray[np.uint8]:
    """Show three channels (numbered from 1; default: the first) of float [..., channels] as red, green and blue, uint8
    [..., 3]: black is two deviations below the channel's mean, white two above. uint8 [..., 3] stays as it is."""
    if pixels.dtype == np.uint8:
        return pixels
    last = pixels.shape[-1]
    chosen = [min(each, last) - 1 for each in (shown or (1, 2, 3))]
    low = np.asarray(mean)[chosen] - _SHOWN_DEVIATIONS * np.asarray(std)[chosen]
    span = np.maximum(2 * _SHOWN_DEVIATIONS * np.asarray(std)[chosen], 1e-12)
    return (255 * ((pixels[..., chosen] - low) / span).clip(0, 1)).round().astype(np.uint8)


def usual_range(pixels: Sequence[NDArray[Any]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Measure each channel's mean and deviation over some images, for `as_colours` where the set's are unknown."""
    values = np.concatenate([each.reshape(-1, each.shape[-1]) for each in pixels]).astype(np.float64)
    return tuple(values.mean(axis=0).tolist()), tuple(values.std(axis=0).tolist())

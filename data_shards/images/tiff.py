"""Read the first page of a TIFF with any number of channels of 8 or 16 bits or float32, which Pillow alone cannot.

Tags are read here; strips or tiles are decompressed by Pillow's libtiff (LZW, deflate, PackBits, LZMA, Zstandard, or
none), as an 8-bit grey image whose rows are the file's bytes. Pixels or planes, of either byte order, with the
predictors for integers and floats. None, for Pillow to read in full: palette, YCbCr, white-is-zero, JPEG-compressed,
fewer bits. Refused: BigTIFF, integers of 32 bits, bits in reverse, more than 178,956,970 bytes of pixels. Costs a copy
of the file.
"""

import io
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.vocabulary import MOST_PIXELS

TIFF_MAGICS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")

_WIDTH, _LENGTH, _BITS, _COMPRESSION, _PHOTOMETRIC, _OFFSETS, _CHANNELS = 256, 257, 258, 259, 262, 273, 277
_ROWS, _COUNTS, _PLANES, _PREDICTOR, _TILE_WIDTH, _TILE_LENGTH, _TILES, _TILE_COUNTS = (
    278,
    279,
    284,
    317,
    *range(322, 326),
)
_FORMAT, _FILL_ORDER = 339, 266
_READ = {
    *(_WIDTH, _LENGTH, _BITS, _COMPRESSION, _PHOTOMETRIC, _OFFSETS, _CHANNELS, _ROWS, _COUNTS, _PLANES, _PREDICTOR),
    *(_TILE_WIDTH, _TILE_LENGTH, _TILES, _TILE_COUNTS, _FORMAT, _FILL_ORDER),
}
_SIZES = {1: "B", 3: "H", 4: "I"}  # field types that sizes and places have
_COMPRESSIONS = (1, 5, 8, 32773, 32946, 34925, 50000)
_PHOTOMETRICS = (1, 2, 5)  # black is zero, colour, separated
_DTYPES = {(8, 1): "u1", (16, 1): "u2", (32, 3): "f4"}  # by bits and sample format
_MOST_CHANNELS = 64  # beyond what is ever asked for


@dataclass(frozen=True)
class Tiff:
    """A page not decompressed yet; `read` gives [height, width, channels] of `dtype`."""

    height: int
    width: int
    channels: int
    dtype: str
    read: Callable[[], NDArray[Any]]


def read_tiff(data: bytes) -> Tiff | None:
    """Read the tags; None if Pillow reads such a page. OSError, ValueError or struct.error if it is damaged."""
    tags = _tags(data)
    (width,), (height,), (channels,) = tags[_WIDTH], tags[_LENGTH], tags.get(_CHANNELS, (1,))
    bits, formats = tags.get(_BITS, (1,)), tags.get(_FORMAT, (1,))
    compression, kind = tags.get(_COMPRESSION, (1,))[0], tags.get(_PHOTOMETRIC, (1,))[0]
    if compression not in _COMPRESSIONS or kind not in _PHOTOMETRICS or max(bits) < 8:
        return None
    if len({*bits}) > 1 or len({*formats}) > 1 or (bits[0], formats[0]) not in _DTYPES:
        raise OSError(f"a TIFF of {bits[0]} bits in format {formats[0]}, where 8 or 16 bits or float32 can be")
    if not 1 <= channels <= _MOST_CHANNELS or min(width, height) < 1:
        raise OSError(f"a TIFF of {width} x {height} pixels and {channels} channels")
    if tags.get(_FILL_ORDER, (1,))[0] != 1:
        raise OSError("a TIFF with the bits of each byte in reverse (FillOrder 2)")
    dtype = np.dtype(("<" if data[:1] == b"I" else ">") + _DTYPES[bits[0], formats[0]])
    return Tiff(height, width, channels, dtype.newbyteorder("=").name, lambda: _pixels(data, tags, dtype))


def _tags(data: bytes) -> dict[int, tuple[int, ...]]:
    """Read the first directory's sizes and places; what lies outside the file is damage."""
    order = "<" if data[:1] == b"I" else ">"
    magic, start = struct.unpack_from(f"{order}HI", data, 2)
    if magic != 42:
        raise OSError("a BigTIFF, which is not read: write it as a TIFF below 4 GB")
    (entries,) = struct.unpack_from(f"{order}H", data, start)
    found: dict[int, tuple[int, ...]] = {}
    for place in range(start + 2, start + 2 + 12 * entries, 12):
        tag, kind, count = struct.unpack_from(f"{order}HHI", data, place)
        if tag not in _READ or tag in found or kind not in _SIZES:  # others could all be as long as the file
            continue
        code = f"{order}{count}{_SIZES[kind]}"
        if struct.calcsize(code) > 4:
            (place,) = struct.unpack_from(f"{order}I", data, place + 8)
            place -= 8
        if place + 8 + struct.calcsize(code) > len(data):
            raise OSError("a TIFF that is cut short")
        found[tag] = struct.unpack_from(code, data, place + 8)
    return found


def _pixels(data: bytes, tags: dict[int, tuple[int, ...]], dtype: np.dtype[Any]) -> NDArray[Any]:
    (width,), (height,), (channels,) = tags[_WIDTH], tags[_LENGTH], tags.get(_CHANNELS, (1,))
    is_tiled = _TILES in tags
    across, down = (tags[_TILE_WIDTH][0], tags[_TILE_LENGTH][0]) if is_tiled else (width, tags.get(_ROWS, (height,))[0])
    if min(across, down) < 1:
        raise OSError("a TIFF of empty strips or tiles")
    planes = channels if tags.get(_PLANES, (1,))[0] == 2 else 1
    columns, rows = -(-width // across), -(-height // down)
    unit = across * channels // planes * dtype.itemsize  # bytes of a row of a strip or tile
    stored = columns * unit, rows * down if is_tiled else height
    if planes * stored[0] * stored[1] > MOST_PIXELS:
        raise OSError(f"a TIFF of {planes * stored[0] * stored[1]:,} bytes of pixels, more than {MOST_PIXELS:,}")
    names = (_TILES, _TILE_COUNTS) if is_tiled else (_OFFSETS, _COUNTS)
    places = [tags[name] for name in names]
    if any(len(each) != planes * columns * rows for each in places):
        raise OSError(f"a TIFF of {len(places[0])} strips or tiles, where there should be {planes * columns * rows}")
    found = np.empty((height, width, channels), dtype.newbyteorder("="))
    for plane in range(planes):
        of_plane = slice(plane * columns * rows, (plane + 1) * columns * rows)
        shape = {_TILE_WIDTH: (unit,), _TILE_LENGTH: (down,)} if is_tiled else {_ROWS: (down,)}
        grey = shape | {name: each[of_plane] for name, each in zip(names, places, strict=True)}
        raw = _bytes(data, grey | {_COMPRESSION: tags.get(_COMPRESSION, (1,))}, size=stored)
        values = _values(
            raw.reshape(stored[1], columns, unit), dtype, channels // planes, tags.get(_PREDICTOR, (1,))[0]
        )
        part = values.reshape(stored[1], columns * across, channels // planes)[:height, :width]
        found[:, :, plane : plane + channels // planes] = part
    return found


def _bytes(data: bytes, tags: dict[int, tuple[int, ...]], *, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Decompress the strips or tiles that `tags` name, as a grey image of 8 bits: [rows, bytes of a row]."""
    from PIL import Image

    order = "<" if data[:1] == b"I" else ">"
    tags |= {_WIDTH: (size[0],), _LENGTH: (size[1],), _BITS: (8,), _PHOTOMETRIC: (1,), _CHANNELS: (1,)}
    start = len(data) + len(data) % 2
    more, after = b"", start + 2 + 12 * len(tags) + 4
    directory = struct.pack(f"{order}H", len(tags))
    for tag, values in sorted(tags.items()):
        packed = struct.pack(f"{order}{len(values)}I", *values)
        if len(values) > 1:
            more, packed = more + packed, struct.pack(f"{order}I", after + len(more))
        directory += struct.pack(f"{order}HHI", tag, 4, len(values)) + packed
    head = data[:4] + struct.pack(f"{order}I", start) + data[8:].ljust(start - 8, b"\0")
    with Image.open(io.BytesIO(head + directory + bytes(4) + more), formats=("TIFF",)) as grey:
        return np.array(grey)


def _values(raw: NDArray[np.uint8], dtype: np.dtype[Any], channels: int, predictor: int) -> NDArray[Any]:
    """Undo the predictor: bytes [rows, units, bytes] -> values [rows, units, pixels, channels]."""
    rows, units, size = raw.shape
    if predictor == 3 and dtype.kind == "f":  # differences of bytes, the highest of all values first
        summed = np.cumsum(raw.reshape(rows, units, -1, channels), axis=2, dtype=np.uint8)
        split = summed.reshape(rows, units, dtype.itemsize, size // dtype.itemsize)
        return np.ascontiguousarray(split.swapaxes(2, 3)).view(">f4").reshape(rows, units, -1, channels)
    if predictor == 1:
        return raw.view(dtype).reshape(rows, units, -1, channels)
    if predictor != 2:
        raise OSError(f"a TIFF with predictor {predictor}")
    whole = np.dtype(f"{dtype.byteorder}u{dtype.itemsize}")
    differences = raw.view(whole).reshape(rows, units, -1, channels)
    native = whole.newbyteorder("=")
    return np.cumsum(differences, axis=2, dtype=native).view(dtype.newbyteorder("="))

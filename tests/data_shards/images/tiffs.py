"""Write TIFFs as the specification (TIFF 6.0) says, for what no library here writes: any channels, layout and order."""

import struct
import zlib

import numpy as np


def tiff(array, *, planes="pixels", compression="none", predictor=1, tile=0, order="<", rows=11) -> bytes:
    """Write [H, W, C] of uint8, uint16 or float32 in strips of some rows, or in square tiles."""
    height, width, channels = array.shape
    down, across = (tile, tile) if tile else (rows, width)
    layers = [array[..., c : c + 1] for c in range(channels)] if planes == "planes" else [array]
    parts = []
    for layer in layers:
        for top in range(0, height, down):
            for left in range(0, width, across):
                part = layer[top : top + down, left : left + across]
                if tile:
                    part = np.pad(part, [(0, tile - part.shape[0]), (0, tile - part.shape[1]), (0, 0)])
                content = _predicted(part, predictor, order)
                parts.append(zlib.compress(content) if compression == "deflate" else content)
    data, places = bytearray((b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, 0)), []
    for part in parts:
        places.append(len(data))
        data += part + bytes(len(part) % 2)
    kind = array.dtype.kind
    tags = {
        256: (4, [width]),
        257: (4, [height]),
        258: (3, [8 * array.dtype.itemsize] * channels),
        259: (3, [8 if compression == "deflate" else 1]),
        262: (3, [1]),
        277: (3, [channels]),
        284: (3, [2 if planes == "planes" else 1]),
        317: (3, [predictor]),
        339: (3, [3 if kind == "f" else 1] * channels),
    }
    sizes = [len(part) for part in parts]
    tags |= {322: (4, [tile]), 323: (4, [tile]), 324: (4, places), 325: (4, sizes)} if tile else {}
    tags |= {} if tile else {273: (4, places), 278: (4, [rows]), 279: (4, sizes)}
    entries = []
    for tag, (code, numbers) in sorted(tags.items()):
        content = struct.pack(f"{order}{len(numbers)}{'H' if code == 3 else 'I'}", *numbers)
        if len(content) > 4:
            at, data = len(data), data + content
            content = struct.pack(order + "I", at)
        entries.append(struct.pack(order + "HHI", tag, code, len(numbers)) + content.ljust(4, b"\0"))
    data[4:8] = struct.pack(order + "I", len(data))
    return bytes(data + struct.pack(order + "H", len(entries)) + b"".join(entries) + bytes(4))


def _predicted(part, predictor, order) -> bytes:
    """Differences along rows: of values (2), or of bytes, the highest of all values of a row first (3)."""
    height, width, channels = part.shape
    if predictor == 2:
        part = np.concatenate([part[:, :1], part[:, 1:] - part[:, :-1]], axis=1)
    if predictor == 3:
        by_byte = part.astype(">f4").view(np.uint8).reshape(height, width * channels, 4).transpose(0, 2, 1)
        row = by_byte.reshape(height, -1)
        row = np.concatenate([row[:, :channels], row[:, channels:] - row[:, :-channels]], axis=1)
        return row.astype(np.uint8).tobytes()
    return part.astype(part.dtype.newbyteorder(order)).tobytes()

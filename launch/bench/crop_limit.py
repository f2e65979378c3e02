"""The limit of decoding: libjpeg-turbo alone on a box of a JPEG, through thirty lines of C.

No Python package offers libjpeg-turbo's own crop, so the C is compiled when it is needed, against the machine's
jpeglib.h (Debian: libjpeg62-turbo-dev). It is linked with the libjpeg-turbo inside Pillow's wheel where that has one:
newer than the system's, and the one that the other methods use. Without a compiler or header there is no limit.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data_shards.images.box import Box, Pixels

_SOURCE = Path(__file__).with_suffix(".c")
_SPARE_COLUMNS = 64  # the crop is widened to whole blocks on both sides: 16 columns each, 32 where chroma is 4:1:1


class NoLimit(Exception):
    """It cannot be measured here; `str(error)` says why."""


def compile_limit(folder: Path) -> Callable[[bytes, Box], Pixels]:
    """The function from a JPEG and a box to pixels [height, width or a little more, 3], compiled into `folder`.

    Raises:
        NoLimit: no compiler, no header, or no library.
    """
    library = folder / "crop_limit.so"
    tried = ""
    for link in (*_pillow_libraries(), "-ljpeg"):
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), link]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
            function = ctypes.CDLL(str(library)).decode_box
        except FileNotFoundError:
            raise NoLimit("there is no C compiler (cc)") from None
        except subprocess.CalledProcessError as error:
            tried = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
        except OSError as error:
            tried = str(error)
        else:
            return _bind(function)
    raise NoLimit(f"libjpeg-turbo's header or library is missing (Debian: libjpeg62-turbo-dev): {tried}")


def _pillow_libraries() -> list[str]:
    import PIL
    from PIL import Image  # noqa: F401 - loads the library, which the linked code then finds by its name

    assert PIL.__file__
    return [str(path) for path in sorted(Path(PIL.__file__).parent.parent.glob("pillow.libs/libjpeg-*"))]


def _bind(function: ctypes._NamedFuncPointer) -> Callable[[bytes, Box], Pixels]:
    size, unsigned = ctypes.c_size_t, ctypes.c_uint
    function.argtypes = [ctypes.c_char_p, size, *[unsigned] * 4, ctypes.c_void_p, size]
    function.restype = ctypes.c_int

    def decode_box(data: bytes, box: Box) -> Pixels:
        columns = box.width + _SPARE_COLUMNS
        pixels = np.empty((box.height, columns, 3), dtype=np.uint8)
        width = function(
            data, len(data), box.left, box.top, box.width, box.height, pixels.ctypes.data, pixels.strides[0]
        )
        if not width:
            raise ValueError("libjpeg-turbo could not decode this box")
        return pixels[:, :width]

    return decode_box

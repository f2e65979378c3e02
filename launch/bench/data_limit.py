"""The limit of decoding: libjpeg-turbo alone on a box of a JPEG, through thirty lines of C.

No Python package offers libjpeg-turbo's own crop, so the C is compiled when it is needed, against the machine's
jpeglib.h (Debian: libjpeg62-turbo-dev), and linked with the libjpeg-turbo inside Pillow's wheel, which the other
methods use too, or else with the system's.
"""

import ctypes
import subprocess
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from shardvit.data_shards.images.crops import Box, Pixels

# The least for a box: entropy-decode the rows down to its end; transform and colour-convert it, widened to blocks.
_SOURCE = r"""
#include <stddef.h>
#include <stdio.h>
#include <setjmp.h>
#include <jpeglib.h>

static jmp_buf failed;
static void leave(j_common_ptr info) { (void)info; longjmp(failed, 1); }
static void be_silent(j_common_ptr info, int level) { (void)info; (void)level; }

static struct jpeg_decompress_struct decoder;
static struct jpeg_error_mgr errors;

/* `out` has room for height rows of row_bytes. Returns the width that was decoded, or 0 if it failed. */
int decode_box(const unsigned char *data, size_t bytes, unsigned left, unsigned top, unsigned width, unsigned height,
               unsigned char *out, size_t row_bytes)
{
    static int ready = 0;
    if (!ready) {
        decoder.err = jpeg_std_error(&errors);
        errors.error_exit = leave;
        errors.emit_message = be_silent;
        if (setjmp(failed)) return 0;
        jpeg_create_decompress(&decoder);
        ready = 1;
    }
    if (setjmp(failed)) {
        jpeg_abort_decompress(&decoder);
        return 0;
    }
    jpeg_mem_src(&decoder, (unsigned char *)data, bytes);
    jpeg_read_header(&decoder, TRUE);
    decoder.out_color_space = JCS_RGB;
    jpeg_start_decompress(&decoder);
    JDIMENSION first = left, wide = width;
    jpeg_crop_scanline(&decoder, &first, &wide);
    if ((size_t)wide * 3 > row_bytes) leave((j_common_ptr)&decoder);
    if (top) jpeg_skip_scanlines(&decoder, top);
    for (unsigned row = 0; row < height;) {
        JSAMPROW at = out + row * row_bytes;
        row += jpeg_read_scanlines(&decoder, &at, 1);
    }
    jpeg_abort_decompress(&decoder);
    return (int)wide;
}
"""
_SPARE_COLUMNS = 64  # the crop is widened to whole blocks on both sides: 16 columns each, 32 where chroma is 4:1:1


class NoLimit(Exception):
    """It cannot be measured here; `str(error)` says why."""


def compile_limit(folder: Path) -> Callable[[bytes, Box], Pixels]:
    """Compile, in `folder`, JPEG and box -> pixels [height, width or a little more, 3]; NoLimit without a compiler."""
    source, library = folder / "limit.c", folder / "limit.so"
    source.write_text(_SOURCE, encoding="utf-8")
    complaint = ""
    for link in (*_pillow_libraries(), "-ljpeg"):
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), link]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
            return _bind(ctypes.CDLL(str(library)).decode_box)
        except FileNotFoundError:
            raise NoLimit("there is no C compiler (cc)") from None
        except subprocess.CalledProcessError as error:
            complaint = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
        except OSError as error:
            complaint = str(error)
    raise NoLimit(f"libjpeg-turbo's header or library is missing (Debian: libjpeg62-turbo-dev): {complaint}")


def _pillow_libraries() -> list[str]:
    package = import_module("PIL._imaging").__file__  # loads the library, which the linked code then finds by its name
    assert package
    return [str(path) for path in sorted(Path(package).parent.parent.glob("pillow.libs/libjpeg-*"))]


def _bind(function: Any) -> Callable[[bytes, Box], Pixels]:
    size, unsigned = ctypes.c_size_t, ctypes.c_uint
    function.argtypes = [ctypes.c_char_p, size, *[unsigned] * 4, ctypes.c_void_p, size]
    function.restype = ctypes.c_int

    def decode_box(data: bytes, box: Box) -> Pixels:
        pixels = np.empty((box.height, box.width + _SPARE_COLUMNS, 3), dtype=np.uint8)
        where = (box.left, box.top, box.width, box.height)
        width = function(data, len(data), *where, pixels.ctypes.data, pixels.strides[0])
        if not width:
            raise ValueError("libjpeg-turbo could not decode this box")
        return pixels[:, :width]

    return decode_box

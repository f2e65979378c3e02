"""Decoding, with Pillow as the oracle; and that bytes which are no image are an `UnreadableImage`, whatever they are.

Every policy of the table in `decode` is tried with every decoder, on the whole image and on a region of it.
"""

import random
import zlib

import numpy as np
import pytest
from PIL import Image

from shardvit.data_shards.errors import UnreadableImage, UserError
from shardvit.data_shards.images import decode, decode_nvimgcodec
from shardvit.data_shards.images.crops import Box
from shardvit.data_shards.images.decode import PixelLimit, read_image
from shardvit.data_shards.vocabulary import MOST_PIXELS, USUAL_MOST_PIXELS
from tests.data_shards.images.pictures import (
    PHOTOGRAPHS,
    TOP,
    assert_within_55_db,
    by_pillow,
    cut,
    decode_without_warnings,
    encoded,
    every_decoder,
    has_nvimgcodec,
    outcome,
    photograph,
    picture,
)

# ---- the same pixels from every decoder, whole and in part


@every_decoder
@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_photographs_are_pillows_whole_and_in_every_region(
    name: str, decoder: decode.DecoderName, monkeypatch: pytest.MonkeyPatch
):
    """Smooth chroma looks at neighbours, so a decoder that stopped at the region's edge would show there."""
    data, draw = PHOTOGRAPHS[name], random.Random(name)
    expected = by_pillow(data)
    if decoder != "pillow":
        monkeypatch.setattr(decode, "open_with_pillow", lambda data: pytest.fail("Pillow was asked"))
    height, width = expected.shape[:2]
    image = read_image(data, decoder=decoder)
    assert (image.height, image.width) == (height, width)
    assert_within_55_db(decode_without_warnings(data, decoder=decoder), expected)
    corners = [(top, left, 1, 1) for top in (0, height - 1) for left in (0, width - 1)]
    corners += [(0, 0, 5, 7), (height - 5, width - 7, 5, 7), (0, 3, height, 1), (height // 2, 0, 1, width)]
    for _ in range(12):
        tall, wide = draw.randint(1, height), draw.randint(1, width)
        corners.append((draw.randint(0, height - tall), draw.randint(0, width - wide), tall, wide))
    for corner in corners:
        box = Box(*corner)
        assert_within_55_db(decode_without_warnings(data, decoder=decoder, box=box), cut(expected, box))


@has_nvimgcodec
def test_auto_decodes_regions_alone_where_that_pays(monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    region, whole = decode_nvimgcodec.decode_jpegs, decode._simplejpeg
    monkeypatch.setattr(decode_nvimgcodec, "decode_jpegs", lambda *a, **k: calls.append("region") or region(*a, **k))
    monkeypatch.setattr(decode, "_simplejpeg", lambda *a: calls.append("whole") or whole(*a))
    image = read_image(PHOTOGRAPHS["china 160 4:2:0"])
    image.pixels(Box(40, 50, 60, 70))
    image.pixels()
    read_image(encoded(Image.fromarray(picture()), "JPEG")).pixels(Box(4, 5, 6, 7))  # so small that the call costs more
    assert calls == ["region", "whole", "whole"]


def test_auto_does_without_nvimgcodec(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decode_nvimgcodec, "complaint", lambda device: "not installed")
    monkeypatch.setattr(decode_nvimgcodec, "decode_jpegs", lambda *a, **k: pytest.fail("it was asked all the same"))
    data, box = PHOTOGRAPHS["china 160 4:2:0"], Box(40, 50, 60, 70)
    assert_within_55_db(decode_without_warnings(data, box=box), cut(by_pillow(data), box))


@every_decoder
def test_what_the_decoder_declines_goes_to_pillow(decoder: decode.DecoderName, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decode_nvimgcodec, "decode_jpegs", lambda parts, **k: [None] * len(parts))
    monkeypatch.setattr(decode, "_simplejpeg", lambda *a: None)
    data, box = PHOTOGRAPHS["flower 131 4:2:2"], Box(40, 50, 60, 70)
    np.testing.assert_array_equal(decode_without_warnings(data, decoder=decoder, box=box), cut(by_pillow(data), box))


# ---- policies


@every_decoder
def test_cmyk_goes_through_pillow(decoder: decode.DecoderName, monkeypatch: pytest.MonkeyPatch):
    """There is no one way from CMYK to RGB; the decoders' own ways differ, so one is taken for all."""
    monkeypatch.setattr(decode_nvimgcodec, "decode_jpegs", lambda *a, **k: pytest.fail("asked nvImageCodec"))
    monkeypatch.setattr(decode, "_simplejpeg", lambda *a: pytest.fail("asked simplejpeg"))
    data = encoded(photograph("flower", height=120, width=150).convert("CMYK"), "JPEG")
    box = Box(10, 20, 30, 40)
    np.testing.assert_array_equal(decode_without_warnings(data, decoder=decoder, box=box), cut(by_pillow(data), box))


def with_frame(data: bytes, *, marker: int = 0xC0, precision: int = 8, height: int = 0, width: int = 0) -> bytes:
    """A JPEG with another start of frame."""
    at, patched = data.index(b"\xff\xc0"), bytearray(data)
    patched[at + 1], patched[at + 4] = marker, precision
    if height or width:
        patched[at + 5 : at + 9] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return bytes(patched)


@every_decoder
@pytest.mark.parametrize("marker", [0xC3, 0xC5, 0xC9, 0xCA, 0xCB])
def test_uncommon_processes_are_pillows_affair(
    decoder: decode.DecoderName, marker: int, monkeypatch: pytest.MonkeyPatch
):
    """Lossless, hierarchical, arithmetic: the frame's header says so, the data are Huffman-coded all the same."""
    monkeypatch.setattr(decode_nvimgcodec, "decode_jpegs", lambda *a, **k: pytest.fail("asked nvImageCodec"))
    monkeypatch.setattr(decode, "_simplejpeg", lambda *a: pytest.fail("asked simplejpeg"))
    data = with_frame(encoded(Image.fromarray(picture(200, 200)), "JPEG"), marker=marker)
    try:
        expected = by_pillow(data)
    except OSError:
        expected = None
    pixels = outcome(data, decoder=decoder)
    assert (pixels is None) == (expected is None)
    if pixels is not None:
        np.testing.assert_array_equal(pixels, expected)


@every_decoder
def test_twelve_bits_are_refused(decoder: decode.DecoderName, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decode_nvimgcodec, "decode_jpegs", lambda *a, **k: pytest.fail("asked nvImageCodec"))
    monkeypatch.setattr(decode, "_simplejpeg", lambda *a: pytest.fail("asked simplejpeg"))
    data = with_frame(encoded(Image.fromarray(picture(200, 200)), "JPEG"), precision=12)
    assert outcome(data, decoder=decoder) is None and outcome(data, decoder=decoder, box=TOP) is None


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "PPM", "WEBP", "AVIF", "JPEG2000"])
def test_lossless_formats_are_exact(format: str):
    noise = np.random.default_rng(0).integers(0, 256, (21, 30, 3), dtype=np.uint8)
    options = {"WEBP": {"lossless": True}, "AVIF": {"quality": 100, "subsampling": "4:4:4"}}.get(format, {})
    data = encoded(Image.fromarray(noise), format, **options)
    if format == "AVIF":
        noise = by_pillow(data)  # its way to YCC and back rounds
    for box in (Box(0, 0, 21, 30), Box(20, 29, 1, 1), Box(3, 5, 10, 7)):
        np.testing.assert_array_equal(decode_without_warnings(data, box=box), cut(noise, box))


@pytest.mark.parametrize("mode", ["L", "LA", "1", "RGBA", "P"])
def test_other_png_modes_give_their_colours(mode: str):
    image = Image.fromarray(picture()).convert(mode)
    if mode in ("LA", "RGBA"):
        image.putalpha(Image.fromarray(picture()[:, :, 0]))
    expected = np.asarray((image.convert("RGBA") if mode == "P" else image).convert("RGB"))
    data, box = encoded(image, "PNG"), Box(3, 5, 10, 7)
    np.testing.assert_array_equal(decode_without_warnings(data), expected)
    np.testing.assert_array_equal(decode_without_warnings(data, box=box), cut(expected, box))
    if mode == "RGBA":  # transparency is dropped, not blended with some background
        np.testing.assert_array_equal(expected, picture())


@pytest.mark.parametrize("transparency", [bytes(range(256)), 7])
def test_a_palette_with_transparent_entries_keeps_its_colours(transparency: bytes | int):
    image = Image.fromarray(picture()).convert("P")
    expected = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(decode_without_warnings(encoded(image, "PNG", transparency=transparency)), expected)


def test_sixteen_bits_become_eight_by_their_upper_byte():
    ramp = np.linspace(0, 65535, 16 * 24).astype(np.uint16).reshape(16, 24)
    files = {
        "PNG": encoded(Image.fromarray(ramp), "PNG"),
        "TIFF": encoded(Image.fromarray(ramp), "TIFF"),
        "big-endian TIFF": encoded(Image.fromarray(ramp.astype(">u2")), "TIFF"),
        "PGM": b"P5 24 16 65535\n" + ramp.astype(">u2").tobytes(),
    }
    for name, data in files.items():
        for box in (Box(0, 0, 16, 24), Box(2, 3, 4, 5)):
            pixels = decode_without_warnings(data, box=box)
            for channel in range(3):
                np.testing.assert_array_equal(pixels[:, :, channel], cut(ramp >> 8, box), err_msg=name)


def test_sixteen_bits_in_colour_too():
    rows = np.linspace(0, 65535, 4 * 6 * 3).astype(">u2").reshape(4, 18)
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    header = (6).to_bytes(4, "big") + (4).to_bytes(4, "big") + bytes([16, 2, 0, 0, 0])
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        png_chunk(*part) for part in ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    )
    np.testing.assert_array_equal(decode_without_warnings(data), (rows >> 8).astype(np.uint8).reshape(4, 6, 3))


def png_chunk(name: bytes, content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + name + content + zlib.crc32(name + content).to_bytes(4, "big")


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_without_a_fixed_range_are_refused(dtype: type):
    """Pillow would clip them at 255 without a word."""
    data = encoded(Image.fromarray(np.arange(600, dtype=dtype).reshape(20, 30)), "TIFF")
    with pytest.raises(UnreadableImage, match="no fixed range"):
        read_image(data).pixels()


@every_decoder
def test_the_orientation_tag_is_not_applied(decoder: decode.DecoderName):
    image = photograph("china", height=110, width=190)
    exif = Image.Exif()
    exif[0x0112] = 6  # "turn by 90 degrees to show it"
    for format in ("JPEG", "PNG"):
        data = encoded(image, format, exif=exif)
        box = Box(80, 150, 30, 40)  # outside the turned image
        assert_within_55_db(decode_without_warnings(data, decoder=decoder, box=box), cut(by_pillow(data), box))
        assert decode_without_warnings(data, decoder=decoder).shape == (110, 190, 3)


@every_decoder
@pytest.mark.filterwarnings("ignore:Image size:PIL.Image.DecompressionBombWarning")
def test_an_image_that_unpacks_to_gigabytes_is_refused_by_its_header(decoder: decode.DecoderName):
    jpeg = encoded(Image.fromarray(picture()), "JPEG")

    def png(height: int, width: int) -> bytes:
        header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
        return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", b"") + png_chunk(b"IEND", b"")

    for height, width in ((13377, 13378), (65535, 65535)):
        assert height * width > MOST_PIXELS
        for data in (with_frame(jpeg, height=height, width=width), png(height, width)):
            with pytest.raises(UnreadableImage, match=r"decompression bomb|data\.max_image_pixels"):
                read_image(data, decoder=decoder)
    most = PixelLimit(MOST_PIXELS)
    for data in (with_frame(jpeg, height=13377, width=13377), png(13377, 13377)):
        assert MOST_PIXELS >= 13377**2 and read_image(data, decoder=decoder, limit=most).height == 13377
        with pytest.raises(UnreadableImage, match=r"13377 x 13377 .*50,000,000 of data\.max_image_pixels"):
            read_image(data, decoder=decoder)


@every_decoder
@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF"])
def test_the_limit_is_exact_and_nothing_beyond_it_is_decoded(
    decoder: decode.DecoderName, format: str, monkeypatch: pytest.MonkeyPatch
):
    data = encoded(Image.fromarray(picture()), format)
    height, width = by_pillow(data).shape[:2]
    allowed = read_image(data, decoder=decoder, limit=PixelLimit(height * width, name="--flag"))
    assert allowed.pixels().shape == (height, width, 3)
    for part in ("crop", "load", "convert"):
        monkeypatch.setattr(Image.Image, part, lambda *_, **__: pytest.fail("it was decoded"))
    with pytest.raises(UnreadableImage, match=rf"^it has {width} x {height} pixels, more than .* of --flag$"):
        read_image(data, decoder=decoder, limit=PixelLimit(height * width - 1, name="--flag"))


@pytest.mark.parametrize("pixels", [0, -1, MOST_PIXELS + 1])
def test_a_limit_that_is_none_is_refused(pixels: int):
    with pytest.raises(UserError, match=r"^--max-image-pixels: "):
        PixelLimit(pixels, name="--max-image-pixels")


def test_the_limit_is_pillows():
    assert Image.MAX_IMAGE_PIXELS is not None and 2 * Image.MAX_IMAGE_PIXELS == MOST_PIXELS
    assert USUAL_MOST_PIXELS < MOST_PIXELS

"""Decoding, with Pillow as the oracle; and that bytes which are no image are a ValueError, whatever they are."""

import io
import random
import warnings

import numpy as np
import pytest
from PIL import Image

from data_shards.decode import decode_rgb


def picture(height: int = 37, width: int = 50) -> np.ndarray:
    """Smooth, as photographs are, so that a JPEG of it is near it; every channel another."""
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    return (np.stack([x, y, (x + y) / 2], axis=2) * 255).astype(np.uint8)


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=format, **options)
    return buffer.getvalue()


def decode_without_warnings(data: bytes) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixels = decode_rgb(data)
    assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
    assert pixels.flags.c_contiguous and pixels.flags.writeable  # torch takes it without a copy or a warning
    return pixels


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg_is_pillows_to_a_rounding_error(subsampling: int, progressive: bool):
    data = encoded(Image.fromarray(picture()), "JPEG", quality=90, subsampling=subsampling, progressive=progressive)
    pixels = decode_without_warnings(data)
    error = pixels.astype(int) - np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    assert np.abs(error).max() <= 4 and (error**2).mean() < 0.2  # over 55 dB: same decoder, other versions
    assert np.abs(pixels.astype(int) - picture()).mean() < 3  # and channels in their order


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpegs_go_the_fast_way_in_every_mode(monkeypatch: pytest.MonkeyPatch, mode: str):
    image = Image.fromarray(picture()).convert(mode)
    data = encoded(image, "JPEG", quality=95)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)

    def pillow_open(*args: object, **options: object) -> None:
        raise AssertionError("Pillow was asked")

    monkeypatch.setattr(Image, "open", pillow_open)
    # CMYK has no one way to RGB; the two libraries' differ by a rounding of each of two steps.
    assert np.abs(decode_without_warnings(data).astype(int) - expected).mean() < (1.5 if mode == "CMYK" else 0.1)


def test_a_jpeg_that_the_fast_way_declines_goes_to_pillow(monkeypatch: pytest.MonkeyPatch):
    import simplejpeg

    def decline(*args: object, **options: object) -> None:
        raise ValueError("declined")

    monkeypatch.setattr(simplejpeg, "decode_jpeg", decline)
    data = encoded(Image.fromarray(picture()), "JPEG")
    np.testing.assert_array_equal(
        decode_without_warnings(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    )


def test_grey_jpeg_becomes_three_equal_channels():
    grey = Image.fromarray(picture()).convert("L")
    data = encoded(grey, "JPEG", quality=95)
    pixels = decode_without_warnings(data)
    assert (pixels == pixels[:, :, :1]).all()
    assert np.abs(pixels[:, :, 0].astype(int) - np.asarray(Image.open(io.BytesIO(data)))).max() <= 1


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "PPM", "WEBP"])
def test_lossless_formats_are_exact(format: str):
    noise = np.random.default_rng(0).integers(0, 256, (21, 30, 3), dtype=np.uint8)
    options = {"lossless": True} if format == "WEBP" else {}
    np.testing.assert_array_equal(decode_without_warnings(encoded(Image.fromarray(noise), format, **options)), noise)


@pytest.mark.parametrize("mode", ["L", "LA", "1", "RGBA", "P"])
def test_other_png_modes_give_their_colours(mode: str):
    image = Image.fromarray(picture()).convert(mode)
    if mode in ("LA", "RGBA"):
        image.putalpha(Image.fromarray(picture()[:, :, 0]))
    colours = image.convert("RGBA") if mode == "P" else image
    pixels = decode_without_warnings(encoded(image, "PNG"))
    np.testing.assert_array_equal(pixels, np.asarray(colours.convert("RGB")))
    if mode == "RGBA":  # transparency is dropped, not blended with some background
        np.testing.assert_array_equal(pixels, picture())


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
        pixels = decode_without_warnings(data)
        assert pixels.shape == (16, 24, 3), name
        for channel in range(3):
            np.testing.assert_array_equal(pixels[:, :, channel], ramp >> 8, err_msg=name)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_without_a_fixed_range_are_refused(dtype: type):
    """Pillow would clip them at 255 without a word."""
    data = encoded(Image.fromarray(np.arange(600, dtype=dtype).reshape(20, 30)), "TIFF")
    with pytest.raises(ValueError, match="no fixed range"):
        decode_rgb(data)


def test_the_orientation_tag_is_not_applied():
    image = Image.fromarray(picture())
    exif = Image.Exif()
    exif[0x0112] = 6  # "turn by 90 degrees to show it"
    for format in ("JPEG", "PNG"):
        assert decode_without_warnings(encoded(image, format, exif=exif)).shape == (37, 50, 3)


FORMATS = [("JPEG", "RGB"), ("PNG", "RGB"), ("PNG", "P"), ("GIF", "P"), ("WEBP", "RGB"), ("BMP", "RGB"), ("TIFF", "L")]


@pytest.mark.parametrize(("format", "mode"), FORMATS)
def test_a_truncated_image_is_a_value_error(format: str, mode: str):
    data = encoded(Image.fromarray(picture()).convert(mode), format)
    end = len(data)
    for length in (end // 4, end // 2, end * 3 // 4):
        with pytest.raises(ValueError, match="not a readable image"):
            decode_rgb(data[:length])


@pytest.mark.parametrize("data", [b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"<svg/>", b"\x00" * 1000])
def test_garbage_is_a_value_error(data: bytes):
    with pytest.raises(ValueError, match="not a readable image"):
        decode_rgb(data)


@pytest.mark.parametrize(("format", "mode"), FORMATS)
@pytest.mark.filterwarnings("ignore")
def test_damaged_bytes_are_pixels_or_a_value_error_and_nothing_else(format: str, mode: str):
    draw = random.Random(0)
    data = encoded(Image.fromarray(picture()).convert(mode), format)
    refused = 0
    for trial in range(60):
        damaged = bytearray(data)
        for _ in range(draw.choice([1, 3, 10])):
            damaged[draw.randrange(min(len(data), 100) if trial % 2 else len(data))] = draw.randrange(256)
        try:
            assert decode_rgb(bytes(damaged)).shape[2] == 3
        except ValueError:
            refused += 1
    assert refused


def test_an_image_that_unpacks_to_gigabytes_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match="decompression bomb"):
        decode_rgb(encoded(Image.fromarray(picture()), "PNG"))

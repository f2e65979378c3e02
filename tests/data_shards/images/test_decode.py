"""Decoding, with Pillow as the oracle; and that bytes which are no image are an `UnreadableImage`, whatever they are.

Every policy of the table in `decode` is tried with every decoder, on the whole image and on a region of it.
"""

import io
import random
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets
from PIL import Image

from data_shards.errors import UnreadableImage
from data_shards.images import decode, decode_nvimgcodec
from data_shards.images.box import Box
from data_shards.images.decode import MOST_PIXELS, read_image

has_nvimgcodec = pytest.mark.skipif(find_spec("nvidia.nvimgcodec") is None, reason="nvImageCodec is not installed")
NVIMGCODEC = pytest.param("nvimgcodec", marks=has_nvimgcodec)
DECODERS = ["auto", NVIMGCODEC, "simplejpeg", "pillow"]
every_decoder = pytest.mark.parametrize("decoder", DECODERS)

TOP = Box(top=0, left=0, height=8, width=9)


def picture(height: int = 37, width: int = 50) -> np.ndarray:
    """Smooth, as photographs are, so that a JPEG of it is near it; every channel another."""
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    return (np.stack([x, y, (x + y) / 2], axis=2) * 255).astype(np.uint8)


def photograph(name: str, *, height: int, width: int) -> Image.Image:
    folder = Path(sklearn.datasets.__file__).parent / "images"
    return Image.open(folder / f"{name}.jpg").crop((100, 60, 100 + width, 60 + height))


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=format, **options)
    return buffer.getvalue()


def by_pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def decode_without_warnings(data: bytes, *, decoder: decode.DecoderName = "auto", box: Box | None = None) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixels = read_image(data, decoder=decoder).pixels(box)
    assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
    assert pixels.flags.c_contiguous and pixels.flags.writeable  # torch takes it without a copy or a warning
    return pixels


def outcome(data: bytes, *, decoder: decode.DecoderName, box: Box | None = None) -> np.ndarray | None:
    """The pixels, or None for an image that is refused."""
    try:
        return read_image(data, decoder=decoder).pixels(box)
    except UnreadableImage:
        return None


def cut(pixels: np.ndarray, box: Box) -> np.ndarray:
    return pixels[box.top : box.bottom, box.left : box.right]


def assert_within_55_db(pixels: np.ndarray, expected: np.ndarray) -> None:
    assert pixels.shape == expected.shape
    error = pixels.astype(int) - expected.astype(int)
    assert np.abs(error).max() <= 4 and (error**2).mean() < 255**2 / 10**5.5  # other builds may round in another way


# ---- the same pixels from every decoder, whole and in part

KINDS = {
    "4:4:4": {"subsampling": 0, "quality": 90},
    "4:2:2": {"subsampling": 1, "quality": 90},
    "4:2:0": {"subsampling": 2, "quality": 90},
    "progressive": {"progressive": True, "quality": 75},
    "restarts": {"restart_marker_rows": 1},
    "RGB, not YCC": {"keep_rgb": True},
}


def photographs() -> dict[str, bytes]:
    files = {}
    for name, height, width in (("china", 160, 208), ("flower", 131, 177), ("china", 17, 250)):
        image = photograph(name, height=height, width=width)
        files |= {f"{name} {height} {kind}": encoded(image, "JPEG", **options) for kind, options in KINDS.items()}
        files[f"{name} {height} grey"] = encoded(image.convert("L"), "JPEG", quality=85)
    return files


PHOTOGRAPHS = photographs()


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


@every_decoder
def test_channels_come_in_their_order(decoder: decode.DecoderName):
    pixels = decode_without_warnings(encoded(Image.fromarray(picture()), "JPEG", quality=90), decoder=decoder)
    assert np.abs(pixels.astype(int) - picture()).mean() < 3


@has_nvimgcodec
def test_auto_decodes_regions_alone_where_that_pays(monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    region, whole = decode_nvimgcodec.decode_jpeg, decode._simplejpeg
    monkeypatch.setattr(decode_nvimgcodec, "decode_jpeg", lambda *a, **k: calls.append("region") or region(*a, **k))
    monkeypatch.setattr(decode, "_simplejpeg", lambda *a: calls.append("whole") or whole(*a))
    image = read_image(PHOTOGRAPHS["china 160 4:2:0"])
    image.pixels(Box(40, 50, 60, 70))
    image.pixels()
    read_image(encoded(Image.fromarray(picture()), "JPEG")).pixels(Box(4, 5, 6, 7))  # so small that the call costs more
    assert calls == ["region", "whole", "whole"]


def test_auto_does_without_nvimgcodec(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decode_nvimgcodec, "complaint", lambda device: "not installed")
    monkeypatch.setattr(decode_nvimgcodec, "decode_jpeg", lambda *a, **k: pytest.fail("it was asked all the same"))
    data, box = PHOTOGRAPHS["china 160 4:2:0"], Box(40, 50, 60, 70)
    assert_within_55_db(decode_without_warnings(data, box=box), cut(by_pillow(data), box))


@every_decoder
def test_what_the_decoder_declines_goes_to_pillow(decoder: decode.DecoderName, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decode_nvimgcodec, "decode_jpeg", lambda *a, **k: None)
    monkeypatch.setattr(decode, "_simplejpeg", lambda *a: None)
    data, box = PHOTOGRAPHS["flower 131 4:2:2"], Box(40, 50, 60, 70)
    np.testing.assert_array_equal(decode_without_warnings(data, decoder=decoder, box=box), cut(by_pillow(data), box))


# ---- policies


@every_decoder
def test_grey_jpeg_becomes_three_equal_channels(decoder: decode.DecoderName):
    data = PHOTOGRAPHS["china 160 grey"]
    for box in (None, Box(3, 4, 50, 60)):
        pixels = decode_without_warnings(data, decoder=decoder, box=box)
        assert (pixels == pixels[:, :, :1]).all() and pixels.std() > 10


@every_decoder
def test_cmyk_goes_through_pillow(decoder: decode.DecoderName, monkeypatch: pytest.MonkeyPatch):
    """There is no one way from CMYK to RGB; the decoders' own ways differ, so one is taken for all."""
    monkeypatch.setattr(decode_nvimgcodec, "decode_jpeg", lambda *a, **k: pytest.fail("asked nvImageCodec"))
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
    monkeypatch.setattr(decode_nvimgcodec, "decode_jpeg", lambda *a, **k: pytest.fail("asked nvImageCodec"))
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
    monkeypatch.setattr(decode_nvimgcodec, "decode_jpeg", lambda *a, **k: pytest.fail("asked nvImageCodec"))
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
            with pytest.raises(UnreadableImage, match="decompression bomb"):
                read_image(data, decoder=decoder)
    for data in (with_frame(jpeg, height=13377, width=13377), png(13377, 13377)):
        assert MOST_PIXELS >= 13377**2 and read_image(data, decoder=decoder).height == 13377


def test_the_limit_is_pillows():
    assert Image.MAX_IMAGE_PIXELS is not None and 2 * Image.MAX_IMAGE_PIXELS == MOST_PIXELS


# ---- damage

FORMATS = [("JPEG", "RGB"), ("PNG", "RGB"), ("PNG", "P"), ("GIF", "P"), ("WEBP", "RGB"), ("BMP", "RGB"), ("TIFF", "L")]


@every_decoder
@pytest.mark.parametrize("name", ["china 160 4:2:0", "flower 131 progressive", "china 160 grey"])
def test_a_truncated_jpeg_is_refused_wherever_the_crop_lies(name: str, decoder: decode.DecoderName):
    data = PHOTOGRAPHS[name]
    end = len(data)
    cuts = [data[:length] for length in (end // 20, end // 2, end * 9 // 10, end - 40, end - 2, end - 1)]
    cuts.append(data[: end // 2] + b"\0" * 100)  # the next block of a file system
    for damaged in cuts:
        for box in (None, TOP):
            with pytest.raises(UnreadableImage, match="not a readable image"):
                read_image(damaged, decoder=decoder).pixels(box)


@every_decoder
def test_without_an_end_marker_pillow_decides_and_not_the_crop(decoder: decode.DecoderName):
    """libjpeg takes foreign bytes for the missing rows if there are enough; so does every other tool."""
    data = PHOTOGRAPHS["china 160 4:2:0"]
    damaged = data[: len(data) // 2] + b"\0" * len(data)
    expected = by_pillow(damaged)
    for box in (Box(0, 0, 160, 208), TOP):
        np.testing.assert_array_equal(outcome(damaged, decoder=decoder, box=box), cut(expected, box))


@every_decoder
def test_the_end_of_a_thumbnail_is_not_taken_for_the_images(decoder: decode.DecoderName):
    thumbnail = encoded(Image.fromarray(picture()), "JPEG")
    data = PHOTOGRAPHS["china 160 4:2:0"]
    segment = b"Exif\0\0" + thumbnail
    data = data[:2] + b"\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment + data[2:]
    assert outcome(data, decoder=decoder, box=TOP) is not None
    assert outcome(data[: len(data) // 2], decoder=decoder, box=TOP) is None


@every_decoder
@pytest.mark.parametrize("garbage", [b"\0" * 5000, b"\xff", b"SEFT" * 30, b"\xff\xd8\xff\xe0 the start of another one"])
def test_bytes_after_the_end_are_ignored(decoder: decode.DecoderName, garbage: bytes):
    data = PHOTOGRAPHS["china 160 4:2:0"]
    for box in (None, Box(100, 120, 50, 60)):
        pixels = decode_without_warnings(data + garbage, decoder=decoder, box=box)
        assert_within_55_db(pixels, decode_without_warnings(data, decoder=decoder, box=box))


@every_decoder
def test_filler_before_markers_is_allowed(decoder: decode.DecoderName, monkeypatch: pytest.MonkeyPatch):
    data = (
        PHOTOGRAPHS["china 160 4:2:0"].replace(b"\xff\xdb", b"\xff\xff\xff\xdb").replace(b"\xff\xc0", b"\xff\xff\xc0")
    )
    expected = by_pillow(data)
    if decoder != "pillow":
        monkeypatch.setattr(decode, "open_with_pillow", lambda data: pytest.fail("Pillow was asked"))
    assert_within_55_db(decode_without_warnings(data, decoder=decoder), expected)


@pytest.mark.parametrize("name", ["china 160 4:2:0", "flower 131 progressive"])
def test_damage_in_the_middle_is_seen_alike_by_every_decoder(name: str):
    """Readable or not, and with which pixels: libjpeg mends what it can, for all of them."""
    data, draw, read = PHOTOGRAPHS[name], random.Random(1), 0
    start = data.rindex(b"\xff\xda") + 20
    for _ in range(10):
        damaged = bytearray(data)
        for at in range(draw.randrange(start, len(data) - 60), len(data))[:30]:
            damaged[at] = draw.randrange(255)  # no marker
        expected = outcome(bytes(damaged), decoder="pillow")
        read += expected is not None
        for decoder in ("auto", "nvimgcodec", "simplejpeg"):
            if decoder == "nvimgcodec" and find_spec("nvidia.nvimgcodec") is None:
                continue
            for box in (Box(0, 0, 131, 160), Box(100, 40, 20, 30)):
                pixels = outcome(bytes(damaged), decoder=decoder, box=box)
                assert (pixels is None) == (expected is None)
                if pixels is not None and expected is not None:
                    assert_within_55_db(pixels, cut(expected, box))
    assert read


@pytest.mark.parametrize(("format", "mode"), FORMATS)
def test_a_truncated_image_is_refused(format: str, mode: str):
    data = encoded(Image.fromarray(picture()).convert(mode), format)
    end = len(data)
    for length in (end // 4, end // 2, end * 3 // 4):
        for box in (None, TOP):
            with pytest.raises(UnreadableImage, match="not a readable image"):
                read_image(data[:length]).pixels(box)


@every_decoder
@pytest.mark.parametrize("data", [b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"<svg/>", b"\x00" * 1000])
def test_garbage_is_refused_without_an_address_in_memory(data: bytes, decoder: decode.DecoderName):
    with pytest.raises(UnreadableImage, match="not a readable image") as caught:
        read_image(data, decoder=decoder).pixels()
    assert " 0x" not in str(caught.value)


def test_a_format_for_which_pillow_would_start_another_program_is_not_known():
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
    assert Image.open(io.BytesIO(eps)).format == "EPS"  # Pillow itself would go on, to Ghostscript
    with pytest.raises(UnreadableImage, match="of no format that is known"):
        read_image(eps)


@every_decoder
@pytest.mark.parametrize(("format", "mode"), FORMATS)
@pytest.mark.filterwarnings("ignore")
def test_damaged_bytes_are_pixels_or_refused_and_nothing_else(format: str, mode: str, decoder: decode.DecoderName):
    draw = random.Random(0)
    image = Image.fromarray(picture(110, 120)).convert(mode)
    data = encoded(image, format)
    refused = 0
    for trial in range(60):
        damaged = bytearray(data)
        for _ in range(draw.choice([1, 3, 10])):
            damaged[draw.randrange(min(len(data), 200) if trial % 2 else len(data))] = draw.randrange(256)
        try:
            opened = read_image(bytes(damaged), decoder=decoder)
            assert opened.pixels(Box(0, 0, 1, 1)).shape == (1, 1, 3)
            assert opened.pixels(Box(opened.height - 1, 0, 1, opened.width)).shape == (1, opened.width, 3)
        except UnreadableImage:
            refused += 1
    assert refused


def test_a_machine_without_memory_is_not_the_images_fault(monkeypatch: pytest.MonkeyPatch):
    def no_memory(*args: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image, "open", no_memory)
    with pytest.raises(MemoryError):
        read_image(encoded(Image.fromarray(picture()), "PNG"))


@every_decoder
def test_threads_do_not_disturb_one_another(decoder: decode.DecoderName):
    jobs = [(data, Box(0, 0, 17, 100)) for data in PHOTOGRAPHS.values()] * 3
    expected = [outcome(data, decoder=decoder, box=box) for data, box in jobs]
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda job: outcome(job[0], decoder=decoder, box=job[1]), jobs)
        for pixels, wanted in zip(results, expected, strict=True):
            np.testing.assert_array_equal(pixels, wanted)

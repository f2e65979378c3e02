"""Images read as they are: pixels equal those that were written, whatever the file, and nothing is run or allocated."""

import io
import itertools
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from shardvit.data_shards.errors import UnreadableImage
from shardvit.data_shards.images.channels import NPY_MAGIC, as_colours, open_to_look, read_channels
from shardvit.data_shards.images.crops import Box
from shardvit.data_shards.images.decode import PixelLimit
from shardvit.data_shards.images.resizing import resize
from tests.data_shards.images.tiffs import tiff

RANGES = {"u1": 255, "u2": 65535, "f4": 1}


def values(kind: str, *shape: int, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).normal(size=shape)
    whole = (drawn * 40 + 128).clip(0, 255) * (RANGES[kind] // 255)
    return drawn.astype("f4") if kind == "f4" else whole.astype(kind)


def npy(array: np.ndarray, **how) -> bytes:
    np.save(file := io.BytesIO(), array, **how)
    return file.getvalue()


@pytest.mark.parametrize("kind", RANGES)
@pytest.mark.parametrize("channels", [1, 2, 5, 16])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_gives_its_values_as_shares_of_their_types_range(kind, channels, order):
    array = values(kind, 7, 9, channels)
    expected = array.astype(np.float32) / np.float32(RANGES[kind])
    for stored in (array, array.astype(array.dtype.newbyteorder(">"))):
        image = read_channels(npy(np.asarray(stored, order=order)), channels=channels)
        assert (image.height, image.width, image.dtype) == (7, 9, np.dtype(kind).name)
        assert np.array_equal(image.pixels(), expected) and image.pixels().dtype == np.float32
        box = Box(top=2, left=3, height=4, width=5)
        assert np.array_equal(image.pixels(box), expected[2:6, 3:8])


def test_an_array_of_two_axes_has_one_channel():
    assert np.array_equal(read_channels(npy(values("f4", 4, 6)), channels=1).pixels()[..., 0], values("f4", 4, 6))


@pytest.mark.parametrize("kind", RANGES)
@pytest.mark.parametrize("planes", ["pixels", "planes"])
@pytest.mark.parametrize("tile", [0, 32])
def test_a_tiff_gives_its_values(kind, planes, tile):
    for channels, compression, predicted, order in itertools.product((1, 4, 13), ("none", "deflate"), (1, 2), "<>"):
        array = values(kind, 37, 50, channels)
        predictor = 3 if kind == "f4" and predicted == 2 else predicted
        content = tiff(array, planes=planes, compression=compression, predictor=predictor, tile=tile, order=order)
        found = read_channels(content, channels=channels)
        assert np.array_equal(found.pixels(), array.astype(np.float32) / np.float32(RANGES[kind]))
        box = Box(top=10, left=20, height=20, width=30)
        assert np.array_equal(found.pixels(box), found.pixels()[10:30, 20:50])


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "CMYK", "F", "I;16"])
@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "zstd"])
def test_pillows_tiffs_are_read_as_pillow_reads_them(mode, compression):
    array = values({"F": "f4", "I;16": "u2"}.get(mode, "u1"), 21, 30, 4)
    picture = Image.fromarray(array[..., 0] if mode in ("L", "F", "I;16") else array[..., :3])
    picture = picture if picture.mode == mode else picture.convert(mode)
    picture.save(file := io.BytesIO(), "TIFF", compression=compression)
    with Image.open(file) as opened:
        expected = np.asarray(opened)
    found = read_channels(file.getvalue(), channels=None)
    top = RANGES[found.dtype[0] + {"uint8": "1", "uint16": "2", "float32": "4"}[found.dtype]]
    assert np.array_equal(found.pixels(), expected.reshape(21, 30, -1).astype(np.float32) / np.float32(top))


def png16(array: np.ndarray) -> bytes:
    """Write a PNG of 16 bits by hand: Pillow writes none in colour."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    height, width, channels = array.shape
    header = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_a_grey_png_keeps_its_16_bits_and_one_in_colour_is_refused():
    array = np.random.default_rng(0).integers(0, 65536, (11, 13, 4)).astype(np.uint16)
    found = read_channels(png16(array[..., :1]), channels=1)
    assert np.array_equal(found.pixels(), array[..., :1].astype(np.float32) / np.float32(65535))
    assert found.dtype == "uint16"
    for channels in (2, 3, 4):
        with pytest.raises(UnreadableImage, match="upper 8"):
            read_channels(png16(array[..., :channels]), channels=channels)


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("LA", 2), ("RGB", 3), ("RGBA", 4), ("P", 3), ("1", 1)])
def test_other_files_have_the_channels_that_they_have(mode, channels):
    picture = Image.fromarray(values("u1", 8, 8, 3)).convert(mode)
    picture.save(file := io.BytesIO(), "PNG")
    expected = np.asarray(picture.convert({"P": "RGB", "1": "L"}.get(mode, mode))).reshape(8, 8, channels)
    found = read_channels(file.getvalue(), channels=channels)
    assert np.array_equal(found.pixels(), expected.astype(np.float32) / np.float32(255))
    with pytest.raises(UnreadableImage, match="5"):
        read_channels(file.getvalue(), channels=5)


def header(shape: tuple[int, ...], *, of: str = "<f4") -> bytes:
    np.lib.format.write_array_header_1_0(file := io.BytesIO(), {"descr": of, "fortran_order": False, "shape": shape})
    return file.getvalue()


HUGE = [
    header((2**40, 2**40, 5)),
    header((7000, 8000, 5)),
    header((2**31, 1, 3), of="|u1"),
    header((40, 40, 5)) + bytes(100),  # fewer values than it says
    npy(np.array([{"a": 1}], dtype=object), allow_pickle=True),
    npy(np.zeros((4, 4, 3), np.complex64)),
    npy(np.zeros((4, 4, 3), np.int64)),
    npy(np.zeros((4, 4, 3, 2), np.float32)),
    npy(np.zeros((0, 4, 3), np.float32)),
    npy(np.zeros(4, [("a", "f4")])),
    NPY_MAGIC,
    NPY_MAGIC + b"\x01\x00\x20\x00" + b"__import__('os').getcwd()".ljust(32),
]


@pytest.mark.parametrize("content", HUGE)
def test_a_hostile_array_is_refused_before_anything_is_allocated(content, monkeypatch):
    monkeypatch.setattr(np, "empty", lambda *_, **__: pytest.fail("memory was asked for"))
    with pytest.raises(UnreadableImage):
        read_channels(content, channels=None).pixels()


@pytest.mark.parametrize("tile", [0, 16])
def test_a_damaged_tiff_is_refused_or_read_within_its_limits(tile):
    content = bytearray(tiff(values("u2", 20, 20, 4), compression="deflate", predictor=2, tile=tile))
    for at in range(8, 200, 3):
        _damaged_at(content, at)


def _damaged_at(content: bytearray, at: int) -> None:
    for place, value in ((at, 0xFF), (len(content) - at, 0x7F)):
        damaged = content.copy()
        damaged[place] = value
        try:
            image = read_channels(bytes(damaged), channels=None, limit=PixelLimit(10_000))
            assert image.height * image.width <= 10_000 and np.isfinite(image.pixels()).all()
        except UnreadableImage:
            pass
    with pytest.raises(UnreadableImage):
        read_channels(bytes(content[: len(content) - at]), channels=4).pixels()


def test_a_tiff_of_more_than_the_limit_is_refused_before_it_is_decompressed():
    content = tiff(values("u1", 300, 300, 3), compression="deflate")
    with pytest.raises(UnreadableImage, match="more than"):
        read_channels(content, channels=3, limit=PixelLimit(89_999))


def _with_entries(content: bytes, entries: list[tuple[int, int, int, int]]) -> bytes:
    """Put entries of (tag, type, count, value) before those of a little-endian TIFF."""
    (start,) = struct.unpack_from("<I", content, 4)
    (count,) = struct.unpack_from("<H", content, start)
    more = b"".join(struct.pack("<HHII", *each) for each in entries)
    return content[:start] + struct.pack("<H", count + len(entries)) + more + content[start + 2 :]


def test_a_tiffs_tags_that_nothing_reads_take_no_memory():
    array = values("u1", 300, 400, 3)
    content = tiff(array)
    (start,) = struct.unpack_from("<I", content, 4)
    of_the_whole_file = [(60_000 + number, 1, start, 0) for number in range(500)]
    hostile = _with_entries(content, of_the_whole_file)
    tracemalloc.start()
    try:
        assert read_channels(hostile, channels=3).height == 300
        assert tracemalloc.get_traced_memory()[1] < 4 * len(hostile)
    finally:
        tracemalloc.stop()


def test_a_tiff_whose_bits_are_in_reverse_is_refused():
    content = _with_entries(tiff(values("u1", 8, 8, 3)), [(266, 3, 1, 2)])
    with pytest.raises(UnreadableImage, match="FillOrder"):
        read_channels(content, channels=3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_none_is_refused_whatever_the_crop(bad):
    array = values("f4", 8, 8, 2)
    array[7, 7, 1] = bad
    for content in (npy(array), tiff(array)):
        with pytest.raises(UnreadableImage, match="NaN"):
            read_channels(content, channels=2).pixels(Box(top=0, left=0, height=2, width=2))


def test_what_is_looked_at_without_a_manifest_is_as_it_is():
    Image.fromarray(values("u1", 8, 8, 3)).save(file := io.BytesIO(), "PNG")
    assert open_to_look(file.getvalue()).pixels().dtype == np.uint8
    assert open_to_look(npy(values("f4", 8, 8, 5))).pixels().shape == (8, 8, 5)
    with pytest.raises(UnreadableImage):
        open_to_look(b"nothing")


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("size", [(9, 7), (40, 61)])
@pytest.mark.parametrize("how", [("bilinear", "antialiased"), ("bicubic", "antialiased"), ("bilinear", "none")])
def test_each_channel_is_resized_as_torch_and_pillow_resize_it_alone(channels, size, how):
    interpolation, antialias = how
    array = values("f4", 23, 31, channels)
    found = resize(array, height=size[0], width=size[1], interpolation=interpolation, antialias=antialias)
    assert found.dtype == np.float32 and found.shape == (*size, channels)
    for channel in range(channels):
        alone = torch.from_numpy(array[None, None, ..., channel].copy())
        mode = {"mode": interpolation, "antialias": antialias == "antialiased"}
        expected = torch.nn.functional.interpolate(alone, size, **mode)[0, 0].numpy()
        assert np.abs(found[..., channel] - expected).max() < 1e-5
        if antialias == "antialiased" and interpolation == "bilinear":
            pillow = Image.fromarray(array[..., channel].copy()).resize(size[::-1], Image.Resampling.BILINEAR)
            assert np.abs(found[..., channel] - np.asarray(pillow)).max() < 1e-4


@pytest.mark.parametrize("how", [{"antialias": "cast"}, {"interpolation": "area"}])
def test_googles_kernels_keep_the_fractions_of_floats(how):
    array = (values("u1", 24, 36, 4)).astype(np.float32)
    found = resize(array, height=8, width=9, **how)
    three = [resize(array[..., [c, c, c]].astype(np.uint8), height=8, width=9, **how)[..., 0] for c in range(4)]
    assert np.array_equal(found.astype(np.uint8), np.stack(three, axis=-1))  # they truncate
    assert (found != np.floor(found)).any()


def test_three_channels_are_shown_from_two_deviations_below_the_mean():
    pixels = np.stack([np.full((2, 2), each) for each in (1.0, 2.0, 3.0, -9.0)], axis=-1).astype(np.float32)
    mean, std = (1.0, 0.0, 5.0, 0.0), (1.0, 1.0, 1.0, 1.0)
    assert as_colours(pixels, mean=mean, std=std)[0, 0].tolist() == [128, 255, 0]
    assert as_colours(pixels, mean=mean, std=std, shown=(2, 4, 1))[0, 0].tolist() == [255, 0, 128]
    assert as_colours(pixels[..., :1], mean=mean, std=std)[0, 0].tolist() == [128, 128, 128]

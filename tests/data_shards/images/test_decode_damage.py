"""Damaged and strange bytes: refused alike by every decoder, wherever the crop lies."""

import io
import random
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image

from shardvit.data_shards.errors import UnreadableImage
from shardvit.data_shards.images import decode
from shardvit.data_shards.images.crops import Box
from shardvit.data_shards.images.decode import read_image
from tests.data_shards.images.pictures import (
    PHOTOGRAPHS,
    TOP,
    assert_within_55_db,
    by_pillow,
    cut,
    decode_without_warnings,
    encoded,
    every_decoder,
    outcome,
    picture,
)

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
    assert Image.open(io.BytesIO(eps)).format == "EPS"  # Pillow itself would continue, to Ghostscript
    with pytest.raises(UnreadableImage, match="of no known format"):
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

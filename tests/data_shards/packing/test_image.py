"""Images in tars: the same bytes, or a reduced JPEG whose pixels training then sees."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shardvit.data_shards.errors import UnreadableImage, UserError
from shardvit.data_shards.images.decode import read_image
from shardvit.data_shards.packing.image import Resize, prepare_image


def encoded(pixels: np.ndarray | Image.Image, format: str = "PNG", **options: object) -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    buffer = io.BytesIO()
    image.save(buffer, format=format, **options)
    return buffer.getvalue()


def gradient(height: int, width: int) -> np.ndarray:
    """Smooth colours, so that JPEG and the reduction lose little."""
    y, x = np.mgrid[0:height, 0:width]
    channels = [255 * y / max(height - 1, 1), 255 * x / max(width - 1, 1), 128 + 0 * x]
    return np.stack(channels, axis=2).astype(np.uint8)


@settings(max_examples=40, deadline=None)
@given(height=st.integers(1, 90), width=st.integers(1, 90), short=st.integers(1, 60))
def test_the_short_side_is_reduced_never_enlarged(height: int, width: int, short: int):
    data = encoded(gradient(height, width))
    made = prepare_image(data, resize=Resize(short))
    if min(height, width) <= short:
        assert made.data == data and made.extension == "png"
        return
    assert made.extension == "jpg"
    size = Image.open(io.BytesIO(made.data)).size
    assert min(size) == short
    scale = short / min(height, width)
    assert abs(size[0] - width * scale) <= 0.5 and abs(size[1] - height * scale) <= 0.5


def test_pixels_are_those_of_an_antialiased_reduction_in_420():
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (200, 300, 3), dtype=np.uint8)  # noise: without antialiasing it would stay noise
    made = prepare_image(encoded(pixels), resize=Resize(50, quality=95))
    got = read_image(made.data).pixels().astype(float)
    expected = np.asarray(Image.fromarray(pixels).resize((75, 50), Image.Resampling.LANCZOS), dtype=float)
    luma = np.array([0.299, 0.587, 0.114])  # the channel that 4:2:0 keeps in full
    assert np.abs(got @ luma - expected @ luma).mean() < 2
    assert got.std() < 0.5 * pixels.std()
    image = Image.open(io.BytesIO(made.data))
    assert image.format == "JPEG" and [layer[1:3] for layer in image.layer] == [(2, 2), (1, 1), (1, 1)]


def test_quality_is_libjpegs():
    data = encoded(np.random.default_rng(0).integers(0, 256, (80, 80, 3), dtype=np.uint8))
    sizes = [len(prepare_image(data, resize=Resize(40, quality=quality)).data) for quality in (30, 60, 90)]
    assert sizes == sorted(sizes) and len(set(sizes)) == 3
    tables = Image.open(io.BytesIO(prepare_image(data, resize=Resize(40, quality=60)).data)).quantization
    expected = Image.open(io.BytesIO(encoded(gradient(8, 8), "JPEG", quality=60))).quantization
    assert tables == expected


@pytest.mark.parametrize("mode", ["L", "RGBA", "LA", "P", "1", "I;16", "CMYK"])
def test_odd_modes_are_reduced_as_the_decoder_sees_them(mode: str):
    if mode == "I;16":
        data = encoded(np.tile((np.arange(64) << 10).astype(np.uint16), (48, 1)))
    else:
        image = Image.fromarray(gradient(48, 64)).convert(mode)
        data = encoded(image, "TIFF" if mode == "CMYK" else "PNG")
    made = prepare_image(data, resize=Resize(24, quality=95))
    seen = Image.fromarray(read_image(data).pixels()).resize((32, 24), Image.Resampling.LANCZOS)
    difference = np.abs(read_image(made.data).pixels().astype(float) - np.asarray(seen, dtype=float))
    assert difference.mean() < (12 if mode in ("P", "1") else 3)  # dithering does not survive 4:2:0


def test_the_orientation_tag_is_not_applied_and_does_not_survive():
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    data = encoded(gradient(40, 80), "JPEG", exif=exif, quality=95)
    made = Image.open(io.BytesIO(prepare_image(data, resize=Resize(20)).data))
    assert made.size == (40, 20) and not made.getexif()
    assert prepare_image(data, resize=Resize(40)).data == data  # small enough: its own bytes, tag and all


def test_what_cannot_be_encoded_again_is_refused():
    with pytest.raises(UnreadableImage, match="do not fit into a JPEG"):
        prepare_image(encoded(np.zeros((3, 100_000), dtype=np.uint8)), resize=Resize(2))


@pytest.mark.parametrize(
    ("short", "quality", "message"), [(0, 90, "resize_short"), (8, 0, "quality"), (8, 101, "quality")]
)
def test_unfit_options_are_refused(short: int, quality: int, message: str):
    with pytest.raises(UserError, match=message):
        Resize(short, quality)


def test_formats_that_shards_do_not_hold_are_named():
    with pytest.raises(UnreadableImage, match="format AVIF are not packed"):
        prepare_image(encoded(gradient(16, 16), "AVIF"))
    assert prepare_image(encoded(gradient(16, 16), "AVIF"), resize=Resize(8)).extension == "jpg"

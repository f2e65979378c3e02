"""Pictures to decode, and what is asked of the result."""

import io
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets
from PIL import Image

from shardvit.data_shards.errors import UnreadableImage
from shardvit.data_shards.images import decode
from shardvit.data_shards.images.crops import Box
from shardvit.data_shards.images.decode import read_image

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


def whole_photograph(name: str) -> Image.Image:
    return Image.open(Path(sklearn.datasets.__file__).parent / "images" / f"{name}.jpg")


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def decibels_between(pixels: np.ndarray, expected: np.ndarray) -> float:
    error = ((pixels.astype(float) - expected.astype(float)) ** 2).mean()
    return float(10 * np.log10(255**2 / error)) if error else np.inf


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

"""The 16 operations of big_vision's RandAugment (`pp/archive/randaug.py`, EfficientNet's) at strength m.

m is at most 10 in the paper and 20 in "How to train your ViT?"; operations with two directions draw a sign:

    ShearX, ShearY               0.03 m
    TranslateX, TranslateY       10 m pixels, whatever the image's size
    Rotate                       3 m degrees
    Color, Brightness, Contrast, Sharpness   factor 0.1 + 0.18 m
    Posterize                    int(0.4 m) bits stay; where that is 0 or above 8, one (TensorFlow clamps the shift)
    Solarize                     threshold int(25.6 m) modulo 256, as TensorFlow makes it uint8: m = 10 and 20 invert
    SolarizeAdd                  int(11 m) added below 128
    Cutout                       a grey square of twice int(4 m) pixels around a random pixel
    AutoContrast, Equalize, Invert

Unlike timm's: Cutout; shifts in pixels; solarize above m = 9; moved pixels are not interpolated; and Contrast, whose
grey is min(255, pixels / 256), 196 at 224 pixels, not the image's mean. Equal to big_vision's own code on TensorFlow
2.21 bit for bit (m = 10 and 15), but for Color and Sharpness (a level or two: Pillow rounds) and pixels of a shear or
rotation that come from exact halves (up to 3 %).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from PIL import Image

OPERATIONS = (
    *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "Color", "Contrast"),
    *("Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd"),
)

_GREY = (128, 128, 128)


@dataclass(frozen=True)
class Draw:
    """Three uniform numbers in [0, 1): the direction, and the place of a cutout."""

    sign: float
    top: float
    left: float


def apply(name: str, image: Image.Image, *, magnitude: int, draw: Draw, timm: ModuleType) -> Image.Image:
    """Apply one of `OPERATIONS` at strength `magnitude` to an RGB image; `timm` is its module of operations."""
    share = magnitude / 10
    factor = 0.1 + 1.8 * share
    directed = -share if draw.sign < 0.5 else share
    moved = {"fillcolor": _GREY, "resample": 0}  # Pillow's nearest
    bits = int(4 * share)
    operations: dict[str, Callable[[], Image.Image]] = {
        "AutoContrast": lambda: timm.auto_contrast(image),
        "Equalize": lambda: timm.equalize(image),
        "Invert": lambda: timm.invert(image),
        "Rotate": lambda: timm.rotate(image, 30 * directed, **moved),
        "Posterize": lambda: timm.posterize(image, bits if 1 <= bits <= 8 else 1),
        "Solarize": lambda: timm.solarize(image, int(256 * share) % 256),
        "SolarizeAdd": lambda: timm.solarize_add(image, int(110 * share)),
        "Color": lambda: timm.color(image, factor),
        "Contrast": lambda: _contrast(image, factor),
        "Brightness": lambda: timm.brightness(image, factor),
        "Sharpness": lambda: timm.sharpness(image, factor),
        "ShearX": lambda: _sheared(image, 0.3 * directed, along="x"),
        "ShearY": lambda: _sheared(image, 0.3 * directed, along="y"),
        "TranslateX": lambda: timm.translate_x_abs(image, 100 * directed, **moved),
        "TranslateY": lambda: timm.translate_y_abs(image, 100 * directed, **moved),
        "Cutout": lambda: _cutout(image, int(40 * share), draw=draw),
    }
    return operations[name]()


def _contrast(image: Image.Image, factor: float) -> Image.Image:
    from PIL import Image

    level = min(255, image.width * image.height // 256)  # the mean of a histogram's 256 counts, not of the image
    return Image.blend(Image.new("RGB", image.size, (level,) * 3), image, factor)


def _sheared(image: Image.Image, level: float, *, along: Literal["x", "y"]) -> Image.Image:
    """Shear as timm, but about the first pixel's centre, where TensorFlow counts from, not its corner."""
    from PIL import Image

    x, y = (1, level, -level / 2), (level, 1, -level / 2)
    matrix = (*x, 0, 1, 0) if along == "x" else (1, 0, 0, *y)
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, resample=Image.Resampling.NEAREST, fillcolor=_GREY
    )


def _cutout(image: Image.Image, reach: int, *, draw: Draw) -> Image.Image:
    """Grey from `reach` pixels before a random pixel to `reach` behind it, which is left out, cut at the border."""
    top, left = int(draw.top * image.height), int(draw.left * image.width)
    image = image.copy()
    image.paste(_GREY, (max(0, left - reach), max(0, top - reach), left + reach, top + reach))
    return image

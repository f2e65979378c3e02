"""RandAugment(n, m) (Cubuk et al., arXiv 1909.13719): n random operations of strength m, as a function of one number.

ranges timm: timm's `rand-m{m}-n{n}-p1-mmax{max(m, 10)}`. All n operations are applied (`p1`; timm's default skips half
of them) with strength m (no `mstd` noise; m above 10 is not cut off: "How to train your ViT?" goes to 20), out of 15
(no `inc`: posterize and solarize would grow stronger with m; Google's grow weaker). Shifts reach 45 % of a side at
m = 10; what is turned is interpolated. timm draws from the global generators of `random` and numpy, which are seeded
here from the sample's number and then restored.

ranges big_vision: the 16 operations of big_vision (`pp/archive/randaug.py`, EfficientNet's), on timm's code:

    ShearX, ShearY               0.03 m, in a random direction
    TranslateX, TranslateY       10 m pixels, whatever the image's size, in a random direction
    Rotate                       3 m degrees, in a random direction
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

Uncovered pixels are (128, 128, 128) in both. Another version of Python (ranges timm) or timm may augment differently.
Cost: 0.1 ms for timm's seeds, and 0.1 to 1.4 ms an operation at 224 pixels: 1.2 ms an image for two of them.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

import numpy as np

from data_shards.errors import UserError
from data_shards.images.crops import Pixels
from data_shards.order.randomness import uniforms
from data_shards.vocabulary import RandAugmentRanges, RandomStream

if TYPE_CHECKING:
    from PIL import Image

OPERATIONS = (
    *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "Color", "Contrast"),
    *("Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd"),
)
_FULL_STRENGTH = 10  # timm's and Google's scale of m
_GREY = (128, 128, 128)
_GENERATORS = threading.Lock()  # there is one of each in a process, and data workers may be threads


@dataclass(frozen=True)
class RandAugment:
    """n operations of strength m, drawn with replacement. Raises UserError for numbers out of range."""

    num_ops: int  # operations on each image
    magnitude: int  # their strength, a whole number as timm wants it; 10 is the end of most operations' scale
    ranges: RandAugmentRanges = "timm"

    def __post_init__(self) -> None:
        if self.num_ops < 1 or self.magnitude < 0 or self.magnitude != int(self.magnitude):
            given = f"num_ops {self.num_ops} must be at least 1, and magnitude {self.magnitude}"
            raise UserError(f"rand_augment: {given} a whole number, at least 0")

    @property
    def timm_config(self) -> str:
        magnitude = int(self.magnitude)
        return f"rand-m{magnitude}-n{self.num_ops}-p1-mmax{max(magnitude, _FULL_STRENGTH)}"

    def __call__(self, image: Pixels, *, draw: float) -> Pixels:
        """uint8 [h, w, 3] and a uniform number in [0, 1) -> uint8 [h, w, 3]."""
        from PIL import Image

        seed = int(draw * 2**53)  # all the bits that it has
        picture = Image.fromarray(image)
        if self.ranges == "big_vision":
            draws = uniforms(RandomStream.RAND_AUGMENT, seed, draws=4 * self.num_ops)
            for which, *rest in draws.reshape(-1, 4).tolist():
                name = OPERATIONS[int(which * len(OPERATIONS))]
                picture = apply_big_visions(name, picture, magnitude=self.magnitude, draws=rest)
            return np.array(picture)
        operations = _timms(self.timm_config)
        with _seeded(seed):
            return np.array(operations(picture))


def apply_big_visions(name: str, image: Image.Image, *, magnitude: int, draws: list[float]) -> Image.Image:
    """Apply one of `OPERATIONS` at strength `magnitude` to an RGB image.

    `draws`: three uniform numbers in [0, 1), for the direction and for a cutout's place (from the top, from the left).
    """
    timm, share = timms_operations(), magnitude / 10
    factor, directed, bits = 0.1 + 1.8 * share, -share if draws[0] < 0.5 else share, int(4 * share)
    moved = {"fillcolor": _GREY, "resample": 0}  # Pillow's nearest
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
        "Cutout": lambda: _cutout(image, int(40 * share), draws=draws),
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
    affine, nearest = Image.Transform.AFFINE, Image.Resampling.NEAREST
    return image.transform(image.size, affine, matrix, resample=nearest, fillcolor=_GREY)


def _cutout(image: Image.Image, reach: int, *, draws: list[float]) -> Image.Image:
    """Grey from `reach` pixels before a random pixel to `reach` behind it, which is left out, cut at the border."""
    top, left = int(draws[1] * image.height), int(draws[2] * image.width)
    image = image.copy()
    image.paste(_GREY, (max(0, left - reach), max(0, top - reach), left + reach, top + reach))
    return image


@cache
def timms_operations() -> ModuleType:
    """Load timm's file of operations alone: all of timm costs each worker 200 MB and 1.4 s."""
    timm = find_spec("timm")
    assert timm is not None and timm.submodule_search_locations
    file = Path(timm.submodule_search_locations[0], "data", "auto_augment.py")
    spec = spec_from_file_location("timm_auto_augment", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def _timms(config: str) -> Callable[[Image.Image], Image.Image]:
    """Make timm's transform, with posterize mended: black below m = 3, where no bit is kept, which Pillow refuses."""
    from PIL import Image

    module = timms_operations()
    posterize = module.posterize

    def posterize_to_black(image: Image.Image, bits_to_keep: int, **options: object) -> Image.Image:
        return posterize(image, bits_to_keep, **options) if bits_to_keep else Image.new(image.mode, image.size)

    module.NAME_TO_OP["Posterize"] = posterize_to_black
    return module.rand_augment_transform(config)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with _GENERATORS:
        of_python, of_numpy = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed >> 21)  # it takes 32 bits; the upper ones
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)

"""RandAugment(n, m) (Cubuk et al., arXiv 1909.13719): n random operations of strength m, as a function of one number.

ranges timm: timm's `rand-m{m}-n{n}-p1-mmax{max(m, 10)}`. n operations out of 15 are all applied (`p1`; timm's default
skips half), at strength m without `mstd` noise. m above 10 is not clipped: "How to train your ViT?" goes to 20. There
is no `inc`, with which posterize and solarize would grow stronger with m; Google's grow weaker. Shifts reach 45 % of a
side at m = 10; geometric operations interpolate. timm draws from the global generators of `random` and numpy, for which
its file gets a pair of each thread's own, seeded from the sample's number: threads augment side by side.

ranges big_vision: the 16 operations of big_vision (`pp/archive/randaug.py`, from EfficientNet), on timm's code:

    ShearX, ShearY               0.03 m, in a random direction
    TranslateX, TranslateY       10 m pixels, whatever the image's size, in a random direction
    Rotate                       3 m degrees, in a random direction
    Color, Brightness, Contrast, Sharpness   factor 0.1 + 0.18 m
    Posterize                    keeps int(0.4 m) bits; one if that is 0 or above 8 (TensorFlow clamps the shift)
    Solarize                     threshold int(25.6 m) modulo 256, TensorFlow's cast to uint8: m = 10 and 20 invert
    SolarizeAdd                  int(11 m) added below 128
    Cutout                       a grey square of side 2 int(4 m) pixels around a random pixel
    AutoContrast, Equalize, Invert

Differences from timm: Cutout; shifts in pixels; solarize above m = 9; no interpolation; and Contrast, whose grey is
min(255, pixels / 256), 196 at 224 pixels, not the image's mean. Bit-identical to big_vision's own code on TensorFlow
2.21 (m = 10 and 15), except for Color and Sharpness (a level or two: Pillow rounds) and sheared or rotated pixels that
come from exact halves (up to 3 %).

Uncovered pixels are (128, 128, 128) in both. Another version of Python (ranges timm) or timm may augment differently.
Cost: 0.1 to 1.4 ms an operation at 224 pixels: 1.2 ms an image for two of them.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.crops import Pixels
from shardvit.data_shards.order.randomness import uniforms
from shardvit.data_shards.vocabulary import RandAugmentRanges, RandomStream

if TYPE_CHECKING:
    from PIL import Image

OPERATIONS = (
    *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "Color", "Contrast"),
    *("Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd"),
)
_FULL_STRENGTH = 10  # timm's and Google's scale of m
_GREY = (128, 128, 128)


@dataclass(frozen=True)
class RandAugment:
    """n operations of strength m, drawn with replacement; UserError for numbers out of range."""

    num_ops: int  # per image
    magnitude: int  # strength, a whole number as timm wants it; most operations' scale ends at 10
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
        """Augment uint8 [h, w, 3]; `draw` is a uniform number in [0, 1)."""
        from PIL import Image

        seed = int(draw * 2**53)  # all its bits
        picture = Image.fromarray(image)
        if self.ranges == "big_vision":
            draws = uniforms(RandomStream.RAND_AUGMENT, seed, draws=4 * self.num_ops)
            for which, *rest in draws.reshape(-1, 4).tolist():
                name = OPERATIONS[int(which * len(OPERATIONS))]
                picture = apply_big_visions(name, picture, magnitude=self.magnitude, draws=rest)
            return np.array(picture)
        seed_timm(seed)
        return np.array(_timms(self.timm_config)(picture))


def apply_big_visions(name: str, image: Image.Image, *, magnitude: int, draws: list[float]) -> Image.Image:
    """Apply one of `OPERATIONS` to an RGB image; `draws`: uniforms in [0, 1) for direction, cutout top, cutout left."""
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

    level = min(255, image.width * image.height // 256)  # the mean of the histogram's 256 counts, not of the image
    return Image.blend(Image.new("RGB", image.size, (level,) * 3), image, factor)


def _sheared(image: Image.Image, level: float, *, along: Literal["x", "y"]) -> Image.Image:
    """Shear about the first pixel's centre, as TensorFlow does; timm shears about its corner."""
    from PIL import Image

    x, y = (1, level, -level / 2), (level, 1, -level / 2)
    matrix = (*x, 0, 1, 0) if along == "x" else (1, 0, 0, *y)
    affine, nearest = Image.Transform.AFFINE, Image.Resampling.NEAREST
    return image.transform(image.size, affine, matrix, resample=nearest, fillcolor=_GREY)


def _cutout(image: Image.Image, reach: int, *, draws: list[float]) -> Image.Image:
    """Grey from `reach` pixels before a random pixel to `reach` after it (exclusive), cut at the border."""
    top, left = int(draws[1] * image.height), int(draws[2] * image.width)
    image = image.copy()
    image.paste(_GREY, (max(0, left - reach), max(0, top - reach), left + reach, top + reach))
    return image


@cache
def timms_operations() -> ModuleType:
    """Load only timm's file of operations: all of timm costs each worker 200 MB and 1.4 s."""
    timm = find_spec("timm")
    assert timm is not None and timm.submodule_search_locations
    file = Path(timm.submodule_search_locations[0], "data", "auto_augment.py")
    spec = spec_from_file_location("timm_auto_augment", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.__dict__.update(random=_Random(), np=_Numpy())
    for name in ("Posterize", "PosterizeIncreasing"):
        module.NAME_TO_OP[name] = partial(_posterize_to_black, module.posterize)
    return module


def _posterize_to_black(
    posterize: Callable[..., Image.Image], image: Image.Image, bits_to_keep: int, **options: object
) -> Image.Image:
    """Posterize as timm does, but to black where no bit is kept, as at m below 3, which Pillow refuses."""
    from PIL import Image

    return posterize(image, bits_to_keep, **options) if bits_to_keep else Image.new(image.mode, image.size)


@cache
def _timms(config: str) -> Callable[[Image.Image], Image.Image]:
    return timms_operations().rand_augment_transform(config)


class _Generators(threading.local):
    """What timm's file knows as `random` and `numpy`; each thread has generators of its own."""

    def __init__(self) -> None:
        self.of_python, self.of_numpy = random.Random(), np.random.RandomState(0)


_GENERATORS = _Generators()


class _Random:
    def __getattr__(self, name: str) -> Any:
        return getattr(_GENERATORS.of_python, name)


class _Numpy:
    @property
    def random(self) -> np.random.RandomState:
        return _GENERATORS.of_numpy

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def seed_timm(seed: int) -> None:
    """Seed this thread's generators of timm's operations, as `random.seed` and `numpy.random.seed` do."""
    _GENERATORS.of_python.seed(seed)
    _GENERATORS.of_numpy.seed(seed >> 21)  # it takes 32 bits; the upper ones

"""Recipe keys for augmentation. No torch."""

import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from shardvit.data_shards.vocabulary import Antialias, CropLaw, EraseMode, RandAugmentRanges, TrainInterpolation
from shardvit.pipeline.own_code.by_path import OwnCode
from shardvit.pipeline.recipe.data import MOST_SIDE
from shardvit.pipeline.recipe.duration import Strict

_NUMBER = r"\d+(?:\.\d+)?"
_AUTO = re.compile(rf"(?:original|originalr|v0|v0r|3a)(?:-(mstd){_NUMBER})?")
_PART = rf"m\d+|n(?:[1-9]|10)|p(?:0(?:\.\d+)?|1(?:\.0+)?)|mstd{_NUMBER}|mmax\d+|inc[01]|t(?:weights|3a|3aw)"
_RAND = re.compile(rf"rand(?:-(?:{_PART}))*")


def _timms_policy(policy: str) -> str:
    """Return timm's string as it is; ValueError for any of which timm would ignore or misread parts."""
    names = [re.match("mstd|mmax|inc|[mnpt]", part) for part in policy.split("-")[1:]]
    twice = len({name and name[0] for name in names}) < len(names)
    if twice or not (_AUTO.fullmatch(policy) or _RAND.fullmatch(policy)):
        raise ValueError(
            f"auto_augment {policy!r} is none of timm's: give original, originalr, v0, v0r, 3a, or such as "
            "rand-m9-mstd0.5-inc1, whose parts are m, n, p, mstd, mmax, inc and t, once each"
        )
    return policy


def _four(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = [value] * 3
    return (*value, 0.0) if isinstance(value, list | tuple) and len(value) == 3 else value


Change = Annotated[float, Field(ge=0)]
Jitter = Annotated[tuple[Change, Change, Change, Annotated[float, Field(ge=0, le=0.5)]], BeforeValidator(_four)]


class RandAugmentConfig(Strict):
    """RandAugment(n, m): n operations of magnitude m per image (arXiv 1909.13719; timm's operations)."""

    num_ops: int = Field(default=2, ge=1, le=10)
    magnitude: int = Field(ge=0, le=30)
    ranges: RandAugmentRanges = "timm"
    """Scale of magnitudes. big_vision: Google's, with shifts in pixels, cutout and its own solarize."""


class RandomErasingConfig(Strict):
    """Erase rectangles of 2 % to 1/3 of the area, after normalisation and before mixing (arXiv 1708.04896, as timm)."""

    probability: float = Field(gt=0, le=1)
    """Share of images; DeiT: 0.25."""
    mode: EraseMode = "pixel"
    """Fill: the mean colour (const), a random colour (rand), or noise (pixel, DeiT's)."""
    count: int = Field(default=1, ge=1, le=100)
    """Most rectangles of an image, which share the area."""


class AugmentConfig(Strict):
    """Random crop and flip, and stronger augmentation (off by default).

    Google's pre-training: `crop: google` and `antialias: none` (big_vision: `cast`). Its fine-tuning on small sets:
    `crop: resize_and_crop`, `resize_size: 448` and `interpolation: area`.
    """

    crop: CropLaw = "torchvision"
    """torchvision's random resized crop, or Google's with smaller crops. resize_and_crop: resize the short side to
    resize_size, then crop a random square of image_size (big_vision's fine-tuning). simple_random: resize it to
    image_size, then crop a random square that may reach 4 pixels out, where the image is mirrored (DeiT III's)."""
    crop_area: tuple[float, float] = (0.05, 1.0)
    """Smallest and largest crop area, as shares of the image."""
    crop_ratio: tuple[float, float] | None = None
    """Smallest and largest aspect ratio of a crop; default: 3/4 to 4/3 (torchvision), 0.75 to 1.33 (google)."""
    resize_size: int | None = Field(default=None, gt=0, le=MOST_SIDE)
    """Short side in pixels before crop resize_and_crop takes its square; Google uses 448 for 384."""
    interpolation: TrainInterpolation = "bilinear"
    """Resize filter. area: average over the area of a pixel (big_vision); random: bilinear or bicubic (timm)."""
    antialias: Antialias = "antialiased"
    """Antialiasing of a bilinear resize. none: Google's code; cast: none, pixels truncated to integers (big_vision)."""
    flip: float = Field(default=0.5, ge=0, le=1)
    """Probability of a horizontal flip; use 0 where left and right matter."""
    repeats: int = Field(default=1, ge=1, le=16)
    """Times that each image comes in its global batch, with other random numbers (repeated augmentation, arXiv
    1901.09335; DeiT: 3). Epochs count images shown: in 300 epochs with 3 repeats an image is in 100 batches."""
    rand_augment: RandAugmentConfig | None = None
    auto_augment: Annotated[str, AfterValidator(_timms_policy)] | None = None
    """timm's string of an AutoAugment or RandAugment: rand-m9-mstd0.5-inc1 (DeiT), original, v0, or 3a: DeiT III's
    3-Augment, to which color_jitter: 0.3 belongs. See docs/recipes.md."""
    color_jitter: Jitter | None = None
    """Greatest change of brightness, contrast, saturation and (if four are given) hue, as torchvision's; one number is
    for the first three."""
    custom: OwnCode | None = None
    """FILE:FUNCTION of your own, last before flip, mixing and normalisation: (uint8 image [size, size, 3],
    numpy Generator of this sample's stream) -> uint8 image of that size; with model.channels float32. See
    docs/own-code.md."""
    random_erasing: RandomErasingConfig | None = None
    mixup_alpha: float = Field(default=0.0, ge=0)
    """Mixup with Beta(alpha, alpha), with the global batch's next image (big_vision: the device's previous); 0: off."""
    cutmix_alpha: float = Field(default=0.0, ge=0)
    """CutMix with Beta(alpha, alpha); 0: off."""
    cutmix_share: float = Field(default=0.5, ge=0, le=1)
    """Share of batches with CutMix rather than mixup, if both are on."""
    mixed_share: float = Field(default=1.0, gt=0, le=1)
    """Share of batches with mixup or CutMix (timm's --mixup-prob)."""

    @property
    def ratio(self) -> tuple[float, float]:
        """`crop_ratio`, by default that of `crop`: Google's code uses TensorFlow's upper limit of 1.33, not 4/3."""
        return self.crop_ratio or ((0.75, 1.33) if self.crop == "google" else (3 / 4, 4 / 3))

    @property
    def of_colours(self) -> tuple[str, ...]:
        """Keys in use that know red, green and blue of 8 bits alone."""
        return tuple(name for name in ("rand_augment", "auto_augment", "color_jitter") if getattr(self, name))

    def problems(self) -> Iterator[str]:
        if not 0 < self.crop_area[0] <= self.crop_area[1] <= 1:
            yield "crop_area must be two shares in ascending order, above 0 and at most 1"
        if self.crop_ratio is not None and not 0 < self.crop_ratio[0] <= self.crop_ratio[1]:
            yield "crop_ratio must be two positive numbers in ascending order"
        why = f"with crop {self.crop}"
        if self.crop != "resize_and_crop":
            yield from self.ignored("resize_size", why=why)
        elif self.resize_size is None:
            yield "crop resize_and_crop needs resize_size: give pixels, such as 448 for image_size 384"
        if self.crop in ("resize_and_crop", "simple_random"):
            yield from self.ignored("crop_area", "crop_ratio", why=why)
        if self.interpolation != "bilinear":
            yield from self.ignored("antialias", why=f"with interpolation {self.interpolation}")
        if self.rand_augment and self.auto_augment:
            yield "rand_augment and auto_augment both choose the operations: leave one out"
        if self.cutmix_share != 0.5 and not (self.mixup_alpha and self.cutmix_alpha):
            yield "cutmix_share chooses between mixup and CutMix: set both alphas, or leave it out"
        if not (self.mixup_alpha or self.cutmix_alpha):
            yield from self.ignored("mixed_share", why="without mixup_alpha or cutmix_alpha")

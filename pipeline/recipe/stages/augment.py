"""Recipe keys for augmentation. No torch."""

from collections.abc import Iterator

from pydantic import Field

from shardvit.data_shards.vocabulary import Antialias, CropInterpolation, CropLaw, RandAugmentRanges
from shardvit.pipeline.own_code.by_path import OwnCode
from shardvit.pipeline.recipe.data import MOST_SIDE
from shardvit.pipeline.recipe.duration import Strict


class RandAugmentConfig(Strict):
    """RandAugment(n, m): n operations of magnitude m per image (arXiv 1909.13719; timm's operations)."""

    num_ops: int = Field(default=2, ge=1, le=10)
    magnitude: int = Field(ge=0, le=30)
    ranges: RandAugmentRanges = "timm"
    """Scale of magnitudes. big_vision: Google's, with shifts in pixels, cutout and its own solarize."""


class AugmentConfig(Strict):
    """Random crop and flip, and stronger augmentation (off by default).

    Google's pre-training: `crop: google` and `antialias: none` (big_vision: `cast`). Its fine-tuning on small sets:
    `crop: resize_and_crop`, `resize_size: 448` and `interpolation: area`.
    """

    crop: CropLaw = "torchvision"
    """torchvision's random resized crop, or Google's with smaller crops. resize_and_crop: resize the short side to
    resize_size, then crop a random square of image_size (big_vision's fine-tuning)."""
    crop_area: tuple[float, float] = (0.05, 1.0)
    """Smallest and largest crop area, as shares of the image."""
    crop_ratio: tuple[float, float] | None = None
    """Smallest and largest aspect ratio of a crop; default: 3/4 to 4/3 (torchvision), 0.75 to 1.33 (google)."""
    resize_size: int | None = Field(default=None, gt=0, le=MOST_SIDE)
    """Short side in pixels before crop resize_and_crop takes its square; Google uses 448 for 384."""
    interpolation: CropInterpolation = "bilinear"
    """Resize filter. area: average over the area of a pixel (big_vision)."""
    antialias: Antialias = "antialiased"
    """Antialiasing of a bilinear resize. none: Google's code; cast: none, pixels truncated to integers (big_vision)."""
    flip: float = Field(default=0.5, ge=0, le=1)
    """Probability of a horizontal flip; use 0 where left and right matter."""
    repeats: int = Field(default=1, ge=1, le=16)
    """Times that each image comes in its global batch, with other random numbers (repeated augmentation, arXiv
    1901.09335; DeiT: 3). Epochs count images shown: in 300 epochs with 3 repeats an image is in 100 batches."""
    rand_augment: RandAugmentConfig | None = None
    custom: OwnCode | None = None
    """FILE:FUNCTION of your own, last before flip, mixing and normalisation: (uint8 image [size, size, 3],
    numpy Generator of this sample's stream) -> uint8 image of that size. See docs/own-code.md."""
    mixup_alpha: float = Field(default=0.0, ge=0)
    """Mixup with Beta(alpha, alpha), with the global batch's next image (big_vision: the device's previous); 0: off."""
    cutmix_alpha: float = Field(default=0.0, ge=0)
    """CutMix with Beta(alpha, alpha); 0: off."""
    cutmix_share: float = Field(default=0.5, ge=0, le=1)
    """Share of batches with CutMix rather than mixup, if both are on."""

    @property
    def ratio(self) -> tuple[float, float]:
        """`crop_ratio`, by default that of `crop`: Google's code uses TensorFlow's upper limit of 1.33, not 4/3."""
        return self.crop_ratio or ((0.75, 1.33) if self.crop == "google" else (3 / 4, 4 / 3))

    def problems(self) -> Iterator[str]:
        if not 0 < self.crop_area[0] <= self.crop_area[1] <= 1:
            yield "crop_area must be two shares in ascending order, above 0 and at most 1"
        if self.crop_ratio is not None and not 0 < self.crop_ratio[0] <= self.crop_ratio[1]:
            yield "crop_ratio must be two positive numbers in ascending order"
        if self.crop != "resize_and_crop":
            yield from self.ignored("resize_size", why=f"with crop {self.crop}")
        else:
            yield from self.ignored("crop_area", "crop_ratio", why="with crop resize_and_crop")
            if self.resize_size is None:
                yield "crop resize_and_crop needs resize_size: give pixels, such as 448 for image_size 384"
        if self.interpolation != "bilinear":
            yield from self.ignored("antialias", why=f"with interpolation {self.interpolation}")
        if self.cutmix_share != 0.5 and not (self.mixup_alpha and self.cutmix_alpha):
            yield "cutmix_share chooses between mixup and CutMix: set both alphas, or leave it out"

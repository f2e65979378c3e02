"""Make uint8 squares of images for training (random crop, resize, augmentation) and evaluation.

Random numbers come from (seed, epoch, sample), so a sample looks the same for any world size and number of workers, and
after a restart. Flip and normalisation run per batch on the device.

Evaluation protocols (`size` is the square's side, `share` is `crop_share`):

    vit         the whole image squashed to the square, bilinear, antialiased
    vit_exact   the same without antialiasing, as google-research/vision_transformer: 33 dB from vit on ImageNet
                photographs, about what a JPEG loses
    big_vision  short side to round(size / share), then the centre, as `resize_small(256)|central_crop(224)`: share
                0.875; bilinear, antialiased
    big_vision_exact  the same with area averages, as google-research/big_vision: 38 to 45 dB from big_vision
    timm        short side to floor(size / share), bicubic, then the centre, as `timm.data.create_transform` for most
                of its Vision Transformers: share 0.9; 73 dB from timm's pixels

A training crop at 224 pixels takes 0.2 ms for an ImageNet photograph, once decoded.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.auto_augment import AutoAugment
from shardvit.data_shards.images.color_jitter import ColorJitter
from shardvit.data_shards.images.crops import (
    CROP_LAWS,
    FLIP_DRAW,
    JITTER_DRAW,
    KERNEL_DRAW,
    OWN_AUGMENT_DRAW,
    RAND_AUGMENT_DRAW,
    TORCHVISION_RATIO,
    Box,
    Pixels,
    place_of,
)
from shardvit.data_shards.images.decode import EncodedImage
from shardvit.data_shards.images.rand_augment import RandAugment
from shardvit.data_shards.images.resizing import placed, resize
from shardvit.data_shards.vocabulary import Antialias, CropInterpolation, CropLaw, EvalProtocol, TrainInterpolation

_CROP_SHARES: dict[EvalProtocol, float] = {"big_vision": 224 / 256, "big_vision_exact": 224 / 256, "timm": 0.9}

_BORDER = 4  # pixels around the image that DeiT III's simple random crop mirrors

# An image of 1 x 65,000 pixels would be blown up to gigabytes before its centre is cut out.
_MOST_ELONGATED = 16


@dataclass(frozen=True)
class TrainTransform:
    """A random crop, resized; mirror flip; optionally RandAugment or AutoAugment, colour jitter, the user's function.

    resize_and_crop is big_vision's `resize_small(resize_size)|random_crop(image_size)` for fine-tuning. simple_random
    is DeiT III's: torchvision's `Resize(image_size)`, then `RandomCrop(image_size, padding=4)` with a mirrored border.
    Google flips before RandAugment, with the same distribution: every directed operation takes both directions equally
    often. AutoAugment gets the mirrored image, as timm's, since timm's ShearY keeps the left edge in place.
    """

    image_size: int  # side of the output square, in pixels
    crop: CropLaw = "torchvision"
    crop_area: tuple[float, float] = (0.05, 1.0)  # range of a random-resized crop's share of the image's area
    crop_ratio: tuple[float, float] = TORCHVISION_RATIO  # range of its width / height
    resize_size: int | None = None  # for resize_and_crop: the short side in pixels, at least `image_size`
    interpolation: TrainInterpolation = "bilinear"  # of the resize; random: bilinear or bicubic, as timm
    antialias: Antialias = "antialiased"  # of a bilinear resize
    flip: float = 0.5  # share of samples mirrored (0.5, or 0 where left and right have a meaning)
    rand_augment: RandAugment | None = None
    auto_augment: AutoAugment | None = None
    color_jitter: ColorJitter | None = None
    own: Callable[[Pixels, np.random.Generator], Pixels] | None = None  # picklable, thread-safe; keeps the size

    def __call__(
        self, image: EncodedImage, *, draws: NDArray[np.float64], into: Pixels | None = None
    ) -> tuple[Pixels, bool]:
        """Return uint8 [size, size, 3], in `into` if given, and whether to mirror it on the device.

        `draws`: the sample's `crops.DRAWS_PER_SAMPLE` random numbers. UnreadableImage if the image is damaged.
        """
        box = self.box(image.height, image.width, draws=draws)
        return self.finish(image.pixels(box), draws=draws, into=into), bool(self.mirrors(draws))

    def at(self, image_size: int) -> "TrainTransform":
        """The same for squares of another side: `resize_size` keeps its ratio to it."""
        resized = self.resize_size and max(image_size, round(self.resize_size * image_size / self.image_size))
        return replace(self, image_size=image_size, resize_size=resized)

    def mirrors(self, draws: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Tell which samples to mirror."""
        return draws[..., FLIP_DRAW] < self.flip

    def box(self, height: int, width: int, *, draws: NDArray[np.float64]) -> Box:
        """Find the box to decode of an image of this size."""
        if self.crop in ("resize_and_crop", "simple_random"):
            return _without_far_ends(height, width)
        return CROP_LAWS[self.crop](height, width, area=self.crop_area, ratio=self.crop_ratio, draws=draws)

    def finish(self, pixels: Pixels, *, draws: NDArray[np.float64], into: Pixels | None = None) -> Pixels:
        """Go on from the box's pixels to the square that a call returns."""
        square = self._resized(pixels, draws=draws, into=into)
        if self.rand_augment is not None:
            square = placed(self.rand_augment(square, draw=float(draws[RAND_AUGMENT_DRAW])), into)
        if self.auto_augment is not None or self.color_jitter is not None:
            square = placed(self._recoloured(square, draws=draws), into)
        if self.own is not None:
            # Philox's stream is one that NumPy keeps for good.
            generator = np.random.Generator(np.random.Philox(key=int(draws[OWN_AUGMENT_DRAW] * 2**53)))
            square = placed(self.own(square, generator), into)
        return square

    def _recoloured(self, square: Pixels, *, draws: NDArray[np.float64]) -> Pixels:
        from PIL import Image

        picture = Image.fromarray(square)
        if self.auto_augment is not None:
            is_mirrored = bool(self.mirrors(draws))
            if is_mirrored:  # by Pillow at a tenth of numpy's cost
                picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            picture = self.auto_augment(picture, draw=float(draws[RAND_AUGMENT_DRAW]))
            if is_mirrored:
                picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.color_jitter is not None:
            picture = self.color_jitter(picture, draw=float(draws[JITTER_DRAW]))
        return np.array(picture)

    def _resized(self, pixels: Pixels, *, draws: NDArray[np.float64], into: Pixels | None) -> Pixels:
        size, kernel = self.image_size, self.interpolation
        if kernel == "random":
            kernel = "bilinear" if draws[KERNEL_DRAW] < 0.5 else "bicubic"
        if self.crop == "resize_and_crop":
            assert self.resize_size is not None and self.resize_size >= size
            scaled = _short_side_to(self.resize_size, pixels, interpolation=kernel, antialias=self.antialias)
            box = place_of(size, height=scaled.shape[0], width=scaled.shape[1], draws=draws)
            return placed(scaled[box.top : box.bottom, box.left : box.right], into)
        if self.crop == "simple_random":
            height, width = (size * side // min(pixels.shape[:2]) for side in pixels.shape[:2])  # torchvision's
            scaled = resize(pixels, height=height, width=width, interpolation=kernel, antialias=self.antialias)
            box = place_of(size, height=height + 2 * _BORDER, width=width + 2 * _BORDER, draws=draws)
            rows = _mirrored_back(np.arange(box.top, box.bottom) - _BORDER, height)
            columns = _mirrored_back(np.arange(box.left, box.right) - _BORDER, width)
            return placed(scaled.take(rows, axis=0).take(columns, axis=1), into)
        return resize(pixels, height=size, width=size, interpolation=kernel, antialias=self.antialias, into=into)


@dataclass(frozen=True)
class EvalTransform:
    """An evaluation protocol; UserError for a `crop_share` outside (0, 1], or where the whole image is squashed."""

    image_size: int  # side of the output square, in pixels
    protocol: EvalProtocol = "vit"
    crop_share: float | None = None  # the square's side over the short side it is cut from; None: the protocol's

    def __post_init__(self) -> None:
        if self.crop_share is not None and (self.protocol not in _CROP_SHARES or not 0 < self.crop_share <= 1):
            raise UserError(
                f"crop_share {self.crop_share} of the evaluation must be above 0 and at most 1, and left out for the "
                "protocols vit and vit_exact, which squash the whole image"
            )

    def __call__(self, image: EncodedImage, *, into: Pixels | None = None) -> Pixels:
        """Return uint8 [size, size, 3], in `into` if given; UnreadableImage if the image is damaged."""
        return self.finish(image.pixels(self.box(image.height, image.width)), into=into)

    def box(self, height: int, width: int, *, draws: None = None) -> Box:
        """Find the box to decode of an image of this size. Nothing is random: `draws` are TrainTransform's alone."""
        if self.protocol in ("vit", "vit_exact"):
            return Box(top=0, left=0, height=height, width=width)
        return _without_far_ends(height, width)

    def finish(self, pixels: Pixels, *, draws: None = None, into: Pixels | None = None) -> Pixels:
        """Go on from the box's pixels to what a call returns."""
        size = self.image_size
        match self.protocol:
            case "vit" | "vit_exact":
                antialias = "none" if self.protocol == "vit_exact" else "antialiased"
                return resize(pixels, height=size, width=size, antialias=antialias, into=into)
            case "big_vision" | "big_vision_exact":
                kernel = "area" if self.protocol == "big_vision_exact" else "bilinear"
                scaled = _short_side_to(round(size / self._share), pixels, interpolation=kernel)
                top, left = (scaled.shape[0] - size) // 2, (scaled.shape[1] - size) // 2
            case "timm":
                side, short = math.floor(size / self._share), min(pixels.shape[:2])
                height, width = side * pixels.shape[0] // short, side * pixels.shape[1] // short
                scaled = resize(pixels, height=height, width=width, interpolation="bicubic")
                # torchvision's rounding: halves to even
                top, left = round((height - size) / 2), round((width - size) / 2)
        return placed(scaled[top : top + size, left : left + size], into)

    @property
    def _share(self) -> float:
        return self.crop_share or _CROP_SHARES[self.protocol]


def _short_side_to(
    side: int, pixels: Pixels, *, interpolation: CropInterpolation, antialias: Antialias = "antialiased"
) -> Pixels:
    ratio = side / min(pixels.shape[:2])
    height, width = round(pixels.shape[0] * ratio), round(pixels.shape[1] * ratio)
    return resize(pixels, height=height, width=width, interpolation=interpolation, antialias=antialias)


def _mirrored_back(index: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Mirror indices beyond the ends back, at the centres of the first and last pixel, as numpy's pad "reflect"."""
    return length - 1 - np.abs(length - 1 - np.abs(index))


def _without_far_ends(height: int, width: int) -> Box:
    """Return the box of the whole image, or of its middle if it is more elongated than any photograph."""
    most = _MOST_ELONGATED * min(height, width)
    tall, wide = min(height, most), min(width, most)
    return Box(top=(height - tall) // 2, left=(width - wide) // 2, height=tall, width=wide)

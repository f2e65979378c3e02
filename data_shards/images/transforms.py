"""Images of any size -> uint8 squares, for training (random crop, resize, RandAugment) and for evaluation.

Random numbers come from (seed, epoch, sample), so a sample looks the same for any world size, number of workers, and
after a restart. Pixels stay uint8 until they are on the device, where flip and normalisation happen per batch (see
`batch`). Resizing is torch's antialiased kernel for uint8: 57 dB against a float reference, 73 to 77 dB from Pillow's.
Google's code does not antialias; for training crops that differs by less than the crop's randomness.

Evaluation protocols (`size` is the square's side, `share` is `crop_share`):

    vit         the whole image squashed to the square, bilinear, as google-research/vision_transformer (without its
                aliasing: 33 dB apart on ImageNet's photographs, about what a JPEG loses)
    big_vision  short side to round(size / share), then the centre, as `resize_small(256)|central_crop(224)`: share
                0.875. big_vision averages areas; torch's nearest is the antialiased bilinear kernel, 44 dB apart
    timm        short side to floor(size / share), bicubic, then the centre, as `timm.data.create_transform` for most
                of its Vision Transformers: share 0.9; 73 dB apart

A training crop at 224 pixels takes 0.2 ms for an ImageNet photograph, once it is decoded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from data_shards.errors import UserError
from data_shards.images.box import Box, Pixels
from data_shards.images.decode import EncodedImage
from data_shards.images.rand_augment import RandAugment
from data_shards.vocabulary import CropInterpolation, EvalProtocol

if TYPE_CHECKING:
    import torch

_CROP_ATTEMPTS = 10  # as torchvision's RandomResizedCrop; TensorFlow's op tries 100 times

# Two numbers for the area and ratio of each attempt at a crop, two for its place, one for the flip, one for
# RandAugment. New ones come at the end, so that runs keep their pixels.
_TOP_DRAW, _LEFT_DRAW, _FLIP_DRAW, _RAND_AUGMENT_DRAW = range(2 * _CROP_ATTEMPTS, 2 * _CROP_ATTEMPTS + 4)
DRAWS_PER_SAMPLE = 2 * _CROP_ATTEMPTS + 4

_CROP_SHARES: dict[EvalProtocol, float] = {"vit": 1.0, "big_vision": 224 / 256, "timm": 0.9}

# An image of one pixel by 65,000 would be blown up to gigabytes before its centre is cut out.
_MOST_ELONGATED = 16


@dataclass(frozen=True)
class TrainTransform:
    """Random-resized crop ("Inception crop"), mirror flip, and optionally RandAugment.

    `crop_area` is the range of the crop's share of the image's area (Google: 0.05 to 1). Google flips before
    RandAugment, with the same distribution: every directed operation takes both directions equally often.
    """

    image_size: int  # side of the square that comes out, in pixels
    crop_area: tuple[float, float] = (0.05, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)  # smallest and largest width/height of a crop (Google: 3/4 to 4/3)
    interpolation: CropInterpolation = "bilinear"  # of the resize; antialiased either way
    flip: float = 0.5  # share of the samples that are mirrored (0.5, or 0 where left and right have a meaning)
    rand_augment: RandAugment | None = None

    def __call__(
        self, image: EncodedImage, *, draws: NDArray[np.float64], into: Pixels | None = None
    ) -> tuple[Pixels, bool]:
        """uint8 [size, size, 3], in `into` if given, and whether to mirror it on the device.

        `draws`: the sample's `DRAWS_PER_SAMPLE` random numbers. Raises UnreadableImage if the image is damaged.
        """
        box = random_crop(image.height, image.width, area=self.crop_area, ratio=self.crop_ratio, draws=draws)
        size = self.image_size
        square = resize(image.pixels(box), height=size, width=size, interpolation=self.interpolation, into=into)
        if self.rand_augment is not None:
            square = _placed(self.rand_augment(square, draw=float(draws[_RAND_AUGMENT_DRAW])), into)
        return square, bool(draws[_FLIP_DRAW] < self.flip)


@dataclass(frozen=True)
class EvalTransform:
    """The evaluation protocol; UserError for a `crop_share` outside (0, 1], or one for `vit`, which does not crop.

    `crop_share` is the square's side over the short side it is cut from; None: the protocol's.
    """

    image_size: int  # side of the square that comes out, in pixels
    protocol: EvalProtocol = "vit"  # one of the three ways above
    crop_share: float | None = None

    def __post_init__(self) -> None:
        if self.crop_share is not None and (self.protocol == "vit" or not 0 < self.crop_share <= 1):
            raise UserError(
                f"crop_share {self.crop_share} of the evaluation must be above 0 and at most 1, and left out for the "
                "protocol vit, which squashes the whole image"
            )

    def __call__(self, image: EncodedImage, *, into: Pixels | None = None) -> Pixels:
        """uint8 [size, size, 3], in `into` if given. Raises UnreadableImage if the image is damaged."""
        size = self.image_size
        share = self.crop_share or _CROP_SHARES[self.protocol]
        box = _without_far_ends(image)
        short = min(box.height, box.width)
        match self.protocol:
            case "vit":
                return resize(image.pixels(), height=size, width=size, into=into)
            case "big_vision":
                ratio = round(size / share) / short
                scaled = resize(image.pixels(box), height=round(box.height * ratio), width=round(box.width * ratio))
                top, left = (scaled.shape[0] - size) // 2, (scaled.shape[1] - size) // 2
            case "timm":
                side = math.floor(size / share)
                height, width = side * box.height // short, side * box.width // short
                scaled = resize(image.pixels(box), height=height, width=width, interpolation="bicubic")
                # torchvision's rounding: halves to even
                top, left = round((height - size) / 2), round((width - size) / 2)
        return _placed(scaled[top : top + size, left : left + size], into)


def _without_far_ends(image: EncodedImage) -> Box:
    """The whole image, or the middle of one more elongated than any photograph."""
    most = _MOST_ELONGATED * min(image.height, image.width)
    height, width = min(image.height, most), min(image.width, most)
    return Box(top=(image.height - height) // 2, left=(image.width - width) // 2, height=height, width=width)


def random_crop(
    height: int, width: int, *, area: tuple[float, float], ratio: tuple[float, float], draws: NDArray[np.float64]
) -> Box:
    """Random-resized crop in pixels: area uniform, width / height log-uniform; the centre where no attempt fits.

    `draws`: at least 2 * attempts + 2 uniform numbers in [0, 1).
    """
    log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
    numbers: list[float] = draws.tolist()  # the same bits, three times as fast to reckon with
    for attempt in range(_CROP_ATTEMPTS):
        target_area = height * width * (area[0] + (area[1] - area[0]) * numbers[2 * attempt])
        shape = math.exp(log_low + (log_high - log_low) * numbers[2 * attempt + 1])
        crop_width, crop_height = round(math.sqrt(target_area * shape)), round(math.sqrt(target_area / shape))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(numbers[_TOP_DRAW] * (height - crop_height + 1))
            left = int(numbers[_LEFT_DRAW] * (width - crop_width + 1))
            return Box(top=top, left=left, height=crop_height, width=crop_width)
    crop_width = min(width, max(1, round(height * ratio[1])))
    crop_height = min(height, max(1, round(width / ratio[0])))
    return Box(top=(height - crop_height) // 2, left=(width - crop_width) // 2, height=crop_height, width=crop_width)


def resize(
    image: Pixels, *, height: int, width: int, interpolation: CropInterpolation = "bilinear", into: Pixels | None = None
) -> Pixels:
    """Antialiased resize of uint8 [H, W, 3] to [height, width, 3], in `into` if given; may return the image itself."""
    if image.shape[:2] == (height, width):
        return _placed(image, into)
    if into is None:
        into = np.empty((height, width, 3), dtype=np.uint8)
    import torch

    # Called by torch.nn.functional.interpolate, which cannot write into given memory.
    aten = torch.ops.aten
    operator = aten._upsample_bilinear2d_aa if interpolation == "bilinear" else aten._upsample_bicubic2d_aa
    operator.out(
        _channels_last(np.ascontiguousarray(image)), (height, width), False, None, None, out=_channels_last(into)
    )
    return into


def _channels_last(image: Pixels) -> torch.Tensor:
    """[h, w, 3] as torch's [1, 3, h, w] of the same memory, with the strides that it resizes 2 to 4 times faster.

    In this order: numpy's [None] would give the new axis stride 0, permute before unsqueeze stride 3.
    """
    import torch

    return torch.from_numpy(image).unsqueeze(0).permute(0, 3, 1, 2)


def _placed(pixels: Pixels, into: Pixels | None) -> Pixels:
    if into is None:
        return np.ascontiguousarray(pixels)
    into[...] = pixels
    return into

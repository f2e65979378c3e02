"""Transforms of training and evaluation: the crops and resizes of `crops` and `resizing`, put together.

The oracles of evaluation are written by others: timm's `create_transform` on Pillow, torchvision's operators, and
big_vision's two functions written down again in numpy's words.
"""

import io
from collections import Counter
from typing import Any

import numpy as np
import pytest
import timm.data
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F
from torchvision.transforms.functional import _compute_resized_output_size
from torchvision.transforms.v2.functional import resize as resize_v2

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.crops import DRAWS_PER_SAMPLE, Box, Pixels, google_crop, place_of, torchvision_crop
from shardvit.data_shards.images.decode import EncodedImage, read_image
from shardvit.data_shards.images.rand_augment import RandAugment
from shardvit.data_shards.images.resizing import resize
from shardvit.data_shards.images.transforms import EvalTransform, TrainTransform
from shardvit.data_shards.order.randomness import uniforms
from shardvit.data_shards.vocabulary import Antialias, CropInterpolation, CropLaw, EvalProtocol
from tests.data_shards.images.pictures import decibels_between as psnr
from tests.data_shards.images.pictures import noise
from tests.data_shards.images.pictures import whole_photograph as photograph

law = settings(max_examples=100, deadline=None)  # a deadline measures how busy the machine is

SIDES = st.integers(1, 3000)
AREA, RATIO = (0.05, 1.0), (3 / 4, 4 / 3)


def draws_for(seed: int) -> np.ndarray:
    return uniforms(seed, draws=DRAWS_PER_SAMPLE)[0]


def held(pixels: Pixels) -> EncodedImage:
    """An image whose pixels are known."""
    height, width = pixels.shape[:2]
    return EncodedImage(height, width, decode=lambda box: pixels[box.top : box.bottom, box.left : box.right])


def jpeg(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


# ---- training


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "area"])
def test_training_crops_resizes_and_flips_by_number_22(interpolation: CropInterpolation):
    """Numbers added since stand behind it: seeds keep their crops and flips."""
    transform = TrainTransform(16, crop_area=(0.2, 0.7), interpolation=interpolation)
    image = noise(50, 70)
    for seed in range(30):
        draws = draws_for(seed)
        box = torchvision_crop(50, 70, area=(0.2, 0.7), ratio=RATIO, draws=draws)
        square, mirror = transform(held(image), draws=draws)
        crop = image[box.top : box.bottom, box.left : box.right]
        np.testing.assert_array_equal(square, resize(crop, height=16, width=16, interpolation=interpolation))
        assert mirror is bool(draws[22] < 0.5)
        shorter = uniforms(seed, draws=23)[0]
        assert torchvision_crop(50, 70, area=(0.2, 0.7), ratio=RATIO, draws=shorter) == box and shorter[22] == draws[22]


def test_a_training_sample_is_full_decode_and_crop_within_55_db():
    data = jpeg(photograph("flower"))
    whole = np.array(Image.open(io.BytesIO(data)))
    transform = TrainTransform(224)
    for seed in range(12):
        square, _ = transform(read_image(data), draws=draws_for(seed))
        box = torchvision_crop(*whole.shape[:2], area=AREA, ratio=RATIO, draws=draws_for(seed))
        crop = torch.from_numpy(whole[box.top : box.bottom, box.left : box.right].copy()).permute(2, 0, 1)[None]
        exact = torch.nn.functional.interpolate(crop.float(), size=(224, 224), mode="bilinear", antialias=True)
        assert psnr(square, exact[0].permute(1, 2, 0).numpy()) > 55


def test_only_the_crop_is_decoded():
    asked: list[Box] = []

    def decode(box: Box) -> Pixels:
        asked.append(box)
        return noise(box.height, box.width)

    TrainTransform(16)(EncodedImage(50, 70, decode=decode), draws=draws_for(4))
    assert asked == [torchvision_crop(50, 70, area=AREA, ratio=RATIO, draws=draws_for(4))]


def test_rand_augment_comes_after_the_resize_with_number_23():
    augment, image = RandAugment(2, 9), held(np.array(photograph("china").crop((0, 0, 200, 150))))
    plain, augmented = TrainTransform(32), TrainTransform(32, rand_augment=augment)
    changed = 0
    for seed in range(20):
        draws = draws_for(seed)
        square, mirror = plain(image, draws=draws)
        result, same_mirror = augmented(image, draws=draws)
        np.testing.assert_array_equal(result, augment(square, draw=float(draws[23])))
        changed += not np.array_equal(result, square)
        assert mirror == same_mirror
    assert changed > 15


@pytest.mark.parametrize(
    ("crop", "antialias"), [("google", "none"), ("google", "cast"), ("google", "antialiased"), ("torchvision", "none")]
)
def test_googles_crop_and_resize_are_used(crop: CropLaw, antialias: Antialias):
    """Only the crop's pixels count; what lies beside it does not reach in."""
    law = {"google": google_crop, "torchvision": torchvision_crop}[crop]
    transform = TrainTransform(16, crop=crop, crop_area=(0.2, 0.7), crop_ratio=(0.75, 1.33), antialias=antialias)
    image = noise(50, 70)
    for seed in range(20):
        box = law(50, 70, area=(0.2, 0.7), ratio=(0.75, 1.33), draws=draws_for(seed))
        square, mirror = transform(held(image), draws=draws_for(seed))
        crop_pixels = image[box.top : box.bottom, box.left : box.right].copy()
        np.testing.assert_array_equal(square, resize(crop_pixels, height=16, width=16, antialias=antialias))
        assert mirror is bool(draws_for(seed)[22] < 0.5)


@pytest.mark.parametrize("kernel", [{"interpolation": "area"}, {"antialias": "cast"}])
def test_resize_and_crop_takes_any_square_of_the_resized_image(kernel: dict[str, Any]):
    """big_vision's `resize_small(24)|random_crop(16)`, with its kernel or another."""
    image = noise(60, 90)
    transform = TrainTransform(16, crop="resize_and_crop", resize_size=24, **kernel)
    scaled = resize(image, height=24, width=36, **kernel)
    places = set()
    for seed in range(300):
        box = place_of(16, height=24, width=36, draws=draws_for(seed))
        square, _ = transform(held(image), draws=draws_for(seed))
        np.testing.assert_array_equal(square, scaled[box.top : box.top + 16, box.left : box.left + 16])
        places.add((box.top, box.left))
    assert {top for top, _ in places} == set(range(9)) and {left for _, left in places} == set(range(21))


def test_simple_random_is_torchvisions_resize_and_padded_crop():
    """`Resize(16)` to its rounding and `RandomCrop(16, padding=4, padding_mode="reflect")`, as in DeiT III."""
    image = noise(70, 47)
    transform = TrainTransform(16, crop="simple_random", interpolation="bicubic")
    height, width = 16 * 70 // 47, 16
    assert _compute_resized_output_size((70, 47), [16]) == [height, width]
    scaled = resize(image, height=height, width=width, interpolation="bicubic")
    padded = F.pad(Image.fromarray(scaled), [4], padding_mode="reflect")
    places = set()
    for seed in range(600):
        box = place_of(16, height=height + 8, width=width + 8, draws=draws_for(seed))
        square, _ = transform(held(image), draws=draws_for(seed))
        np.testing.assert_array_equal(square, np.asarray(F.crop(padded, box.top, box.left, 16, 16)))
        places.add((box.top, box.left))
    assert {top for top, _ in places} == set(range(16)) and {left for _, left in places} == set(range(9))


def test_random_interpolation_is_either_kernel_half_of_the_time():
    image, kinds = held(noise(90, 90)), Counter[str]()
    transforms = {
        kernel: TrainTransform(16, crop_area=(0.5, 1), interpolation=kernel)
        for kernel in ("random", "bilinear", "bicubic")
    }
    for seed in range(400):
        found = {kernel: each(image, draws=draws_for(seed))[0] for kernel, each in transforms.items()}
        kinds.update(k for k in ("bilinear", "bicubic") if np.array_equal(found[k], found["random"]))
    assert kinds.total() == 400 and stats.binomtest(kinds["bilinear"], 400).pvalue > 1e-3


@pytest.mark.parametrize("side", [24, 150])
def test_a_bicubic_crop_is_torchvisions_and_pillows_antialiased_one(side: int):
    y, x = np.mgrid[0:120, 0:120] / 120
    smooth = np.stack([x, y, np.sin(9 * x + 30 * y * y) / 2 + 0.5], axis=2)
    image = (smooth * 200 + noise(120, 120) * 0.2).astype(np.uint8)
    transform = TrainTransform(side, crop_area=(1, 1), crop_ratio=(1, 1), interpolation="bicubic")
    found = transform(held(image), draws=draws_for(1))[0].astype(int)
    tensor = torch.from_numpy(image).permute(2, 0, 1)
    theirs = resize_v2(tensor, [side, side], interpolation=InterpolationMode.BICUBIC, antialias=True)
    assert np.abs(found - theirs.permute(1, 2, 0).numpy()).max() <= 1
    pillows = np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(found - pillows).max() <= 2 and np.mean(found != pillows) < 0.1


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_the_share_of_the_mirrored(share: float):
    transform, image = TrainTransform(8, flip=share), held(noise(8, 8))
    all_draws = uniforms(3, np.arange(2000), draws=DRAWS_PER_SAMPLE)
    mirrored = [transform(image, draws=draws)[1] for draws in all_draws]
    assert abs(np.mean(mirrored) - share) <= 4 * (share * (1 - share) / 2000) ** 0.5


def test_the_flip_does_not_depend_on_the_crop():
    transform, image = TrainTransform(8), held(noise(40, 40))
    all_draws = uniforms(3, np.arange(50), draws=DRAWS_PER_SAMPLE)
    for column in set(range(DRAWS_PER_SAMPLE)) - {22}:
        changed = all_draws.copy()
        changed[:, column] = 0.123
        for before, after in zip(all_draws, changed, strict=True):
            assert transform(image, draws=before)[1] == transform(image, draws=after)[1]


# ---- evaluation


def test_vit_squashes_the_whole_image():
    image = noise(50, 70)
    np.testing.assert_array_equal(EvalTransform(16)(held(image)), resize(image, height=16, width=16))
    exact = EvalTransform(16, protocol="vit_exact")(held(image))
    np.testing.assert_array_equal(exact, resize(image, height=16, width=16, antialias="none"))
    assert EvalTransform(16).protocol == "vit"


SHAPES = [(427, 640), (640, 427), (300, 300), (224, 500), (256, 256), (131, 97), (180, 1234)]


def shaped(height: int, width: int) -> Image.Image:
    return photograph("china").resize((width, height), Image.Resampling.LANCZOS)


@pytest.mark.parametrize(("height", "width"), SHAPES)
@pytest.mark.parametrize(("size", "share"), [(224, None), (224, 0.875), (32, 0.9), (96, 1.0), (224, 0.95)])
def test_timm_evaluation_is_timms(height: int, width: int, size: int, share: float | None):
    """The same pixels but for rounding; a frame that is off by one would show."""
    image = shaped(height, width)
    theirs = timm.data.create_transform(
        (3, size, size), is_training=False, interpolation="bicubic", crop_pct=share or 0.9, mean=(0,) * 3, std=(1,) * 3
    )
    expected = (theirs(image) * 255).round().permute(1, 2, 0).numpy()
    ours = EvalTransform(size, protocol="timm", crop_share=share)(held(np.array(image)))
    assert ours.shape == (size, size, 3) and ours.dtype == np.uint8
    assert psnr(ours, expected) > 60


def big_vision_frame(height: int, width: int, *, smaller: int, size: int) -> tuple[int, int, int, int]:
    """resize_small's size, with TensorFlow's float32 and rounding to even, and central_crop's corner."""
    ratio = np.float32(smaller) / np.float32(min(height, width))
    tall, wide = int(np.rint(np.float32(height) * ratio)), int(np.rint(np.float32(width) * ratio))
    return tall, wide, (tall - size) // 2, (wide - size) // 2


@pytest.mark.parametrize(("height", "width"), SHAPES)
@pytest.mark.parametrize(
    ("size", "share", "smaller"), [(224, None, 256), (384, None, 439), (32, 0.5, 64), (96, 1.0, 96)]
)
def test_big_vision_evaluation_has_its_frame(height: int, width: int, size: int, share: float | None, smaller: int):
    image = np.array(shaped(height, width))
    tall, wide, top, left = big_vision_frame(height, width, smaller=smaller, size=size)
    ours = EvalTransform(size, protocol="big_vision", crop_share=share)(held(image))
    expected = resize(image, height=tall, width=wide)[top : top + size, left : left + size]
    np.testing.assert_array_equal(ours, expected)
    exact = EvalTransform(size, protocol="big_vision_exact", crop_share=share)(held(image))
    averaged = resize(image, height=tall, width=wide, interpolation="area")
    np.testing.assert_array_equal(exact, averaged[top : top + size, left : left + size])


@law
@given(
    SIDES,
    SIDES,
    st.sampled_from(["vit", "vit_exact", "big_vision", "big_vision_exact", "timm"]),
    st.sampled_from([8, 15, 16]),
    st.floats(0.3, 1),
)
def test_every_protocol_gives_the_square_from_the_middle(
    height: int, width: int, protocol: EvalProtocol, size: int, share: float
):
    height, width = 1 + height // 20, 1 + width // 20
    image = np.zeros((height, width, 3), dtype=np.uint8)
    image[: height // 2, :, 0] = 255
    image[:, : width // 2, 1] = 255
    square = EvalTransform(size, protocol=protocol, crop_share=None if protocol.startswith("vit") else share)(
        held(image)
    )
    assert square.shape == (size, size, 3) and square.flags.c_contiguous
    if height % 2 == 0 and width % 2 == 0 and min(height, width) > 8 and max(height, width) < 8 * min(height, width):
        middle = square.mean(axis=(0, 1))[:2]  # half of the rows are red, half of the columns green
        assert (np.abs(middle - 127.5) < 255 * 2.5 / size).all()


@pytest.mark.parametrize("protocol", ["big_vision", "timm"])
def test_an_endless_strip_is_not_blown_up_to_gigabytes(protocol: EvalProtocol):
    """1 x 65,000 pixels would become 256 x 16,640,000."""
    asked: list[Box] = []

    def decode(box: Box) -> Pixels:
        asked.append(box)
        return noise(box.height, box.width)

    for height, width in ((1, 65_000), (65_000, 2)):
        assert EvalTransform(32, protocol=protocol)(EncodedImage(height, width, decode=decode)).shape == (32, 32, 3)
    assert asked == [Box(0, 32_492, 1, 16), Box(32_484, 0, 32, 2)]


@pytest.mark.parametrize(("protocol", "share"), [("vit", 0.9), ("timm", 0.0), ("big_vision", 1.01)])
def test_crop_shares_that_mean_nothing_are_refused(protocol: EvalProtocol, share: float):
    with pytest.raises(UserError, match="crop_share"):
        EvalTransform(16, protocol=protocol, crop_share=share)

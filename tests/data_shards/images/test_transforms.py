"""Crops against torchvision's own code fed with the same numbers; resizing and the ways of evaluating against others'.

The oracles of evaluation are written by others: timm's `create_transform` on Pillow, torchvision's operators, and
big_vision's two functions written down again in numpy's words.
"""

import io
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets
import timm.data
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from torchvision.transforms import RandomResizedCrop, v2

from data_shards.errors import UserError
from data_shards.images.box import Box, Pixels
from data_shards.images.decode import EncodedImage, read_image
from data_shards.images.rand_augment import RandAugment
from data_shards.images.transforms import (
    DRAWS_PER_SAMPLE,
    EvalProtocol,
    EvalTransform,
    TrainTransform,
    random_crop,
    resize,
)
from data_shards.randomness import uniforms
from data_shards.vocabulary import CropInterpolation

law = settings(max_examples=100, deadline=None)  # a deadline measures how busy the machine is

SIDES = st.integers(1, 3000)
AREA, RATIO = (0.05, 1.0), (3 / 4, 4 / 3)


def ranges(low: float, high: float) -> st.SearchStrategy[tuple[float, float]]:
    return st.tuples(st.floats(low, high), st.floats(low, high)).map(lambda pair: (min(pair), max(pair)))


def draws_for(seed: int) -> np.ndarray:
    return uniforms(seed, draws=DRAWS_PER_SAMPLE)[0]


def noise(height: int, width: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def held(pixels: Pixels) -> EncodedImage:
    """An image whose pixels are known."""
    height, width = pixels.shape[:2]
    return EncodedImage(height, width, decode=lambda box: pixels[box.top : box.bottom, box.left : box.right])


def photograph(name: str) -> Image.Image:
    return Image.open(Path(sklearn.datasets.__file__).parent / "images" / f"{name}.jpg")


def jpeg(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def psnr(pixels: np.ndarray, expected: np.ndarray) -> float:
    error = ((pixels.astype(float) - expected.astype(float)) ** 2).mean()
    return float(10 * np.log10(255**2 / error)) if error else np.inf


def torchvision_crop(
    height: int, width: int, area: tuple[float, float], ratio: tuple[float, float], draws: np.ndarray
) -> Box:
    """torchvision's algorithm, its random numbers replaced by ours."""
    shapes, places = iter(draws[:20].tolist()), iter(draws[20:22].tolist())

    class Uniform:
        def uniform_(self, low: float, high: float) -> "Uniform":
            self.value = low + (high - low) * next(shapes)
            return self

        def item(self) -> float:
            return self.value

        __float__ = item

    class Place:
        def __init__(self, low: int, high: int, size: tuple[int, ...]) -> None:
            self.value = low + int(next(places) * (high - low))

        def item(self) -> int:
            return self.value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda size: Uniform())
        patch.setattr(torch, "randint", lambda low, high, size: Place(low, high, size))
        patch.setattr(torch, "exp", lambda value: torch.tensor(float(value), dtype=torch.float64).exp())
        patch.setattr(torch, "log", lambda value: [float(np.log(side)) for side in ratio])
        image = torch.zeros(1, 1, 1).expand(3, height, width)
        top, left, crop_height, crop_width = RandomResizedCrop.get_params(image, list(area), list(ratio))
    return Box(top=top, left=left, height=crop_height, width=crop_width)


@law
@given(SIDES, SIDES, ranges(0.01, 1.0), ranges(0.2, 5.0), st.integers(0, 2**32))
def test_the_crop_is_torchvisions(
    height: int, width: int, area: tuple[float, float], ratio: tuple[float, float], seed: int
):
    draws = draws_for(seed)
    theirs = torchvision_crop(height, width, area, ratio, draws)
    assume(theirs.height > 0 and theirs.width > 0)  # its fallback may round a side to nothing; ours keeps a pixel
    assert random_crop(height, width, area=area, ratio=ratio, draws=draws) == theirs


@pytest.mark.parametrize(("height", "width"), [(10, 1000), (1000, 10), (1, 1), (1, 40), (7, 7)])
def test_where_nothing_fits_the_centre_is_taken_as_torchvision_does(height: int, width: int):
    ratio = (3 / 4, 4 / 3)
    for area in ((1.0, 1.0), (0.9, 1.0)):
        for seed in range(20):
            draws = draws_for(seed)
            ours = random_crop(height, width, area=area, ratio=ratio, draws=draws)
            assert ours == torchvision_crop(height, width, area, ratio, draws)
            if max(height, width) > 10 * min(height, width):
                assert (ours.top, ours.left) == ((height - ours.height) // 2, (width - ours.width) // 2)


@law
@given(
    SIDES,
    SIDES,
    ranges(0.01, 1.0),
    ranges(0.2, 5.0),
    st.lists(st.floats(0, 1 - 2**-53), min_size=DRAWS_PER_SAMPLE, max_size=DRAWS_PER_SAMPLE),
)
def test_a_crop_lies_inside_the_image(
    height: int, width: int, area: tuple[float, float], ratio: tuple[float, float], draws: list[float]
):
    box = random_crop(height, width, area=area, ratio=ratio, draws=np.array(draws))
    assert box.height >= 1 and box.width >= 1 and box.top >= 0 and box.left >= 0
    assert box.top + box.height <= height and box.left + box.width <= width


@law
@given(st.integers(200, 3000), st.integers(200, 3000), st.integers(0, 2**32))
def test_area_and_ratio_stay_in_their_ranges(height: int, width: int, seed: int):
    """Of pictures whose own shape lies in the range; whole pixels let both miss it by half a pixel a side."""
    height = int(np.clip(height, width * 3 / 4, width * 4 / 3))
    box = random_crop(height, width, area=(0.08, 0.9), ratio=RATIO, draws=draws_for(seed))
    slack = 1 / box.height + 1 / box.width
    assert 0.08 * (1 - slack) <= box.height * box.width / (height * width) <= 0.9 * (1 + slack)
    assert RATIO[0] * (1 - slack) <= box.width / box.height <= RATIO[1] * (1 + slack)


def test_area_is_uniform_ratio_log_uniform_and_the_place_uniform():
    # So large and so small a share that every attempt fits and rounding does not show.
    side, all_draws = 20_000, uniforms(5, np.arange(2000), draws=DRAWS_PER_SAMPLE)
    boxes = [random_crop(side, side, area=(0.05, 0.5), ratio=RATIO, draws=draws) for draws in all_draws]
    height, width = (np.array([getattr(box, name) for box in boxes]) for name in ("height", "width"))
    shares = (height * width / side**2 - 0.05) / 0.45
    shapes = np.log(width / height) / np.log(4 / 3) / 2 + 0.5
    down = np.array([box.top for box in boxes]) / (side - height)
    right = np.array([box.left for box in boxes]) / (side - width)
    for numbers in (shares, shapes, down, right):
        assert stats.kstest(numbers, "uniform").pvalue > 1e-3
    for a, b in ((shares, shapes), (shares, down), (shapes, right), (down, right)):
        assert abs(stats.spearmanr(a, b).statistic) < 0.08


# ---- resizing

INTERPOLATIONS = {"bilinear": v2.InterpolationMode.BILINEAR, "bicubic": v2.InterpolationMode.BICUBIC}


@law
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 64), st.integers(1, 64), st.integers(0, 99))
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_resize_equals_torchvisions_antialiased_operator(
    interpolation: CropInterpolation, height: int, width: int, tall: int, wide: int, seed: int
):
    image = noise(height, width, seed)
    operator = v2.Resize((tall, wide), interpolation=INTERPOLATIONS[interpolation], antialias=True)
    expected = operator(torch.from_numpy(image).permute(2, 0, 1)).permute(1, 2, 0).numpy()
    resized = resize(image, height=tall, width=wide, interpolation=interpolation)
    assert resized.dtype == np.uint8 and resized.shape == (tall, wide, 3) and resized.flags.c_contiguous
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        np.testing.assert_array_equal(resized, expected)
    else:  # there torchvision reckons in float32 and rounds, and we in whole numbers
        np.testing.assert_allclose(resized.astype(int), expected.astype(int), atol=1, rtol=0)


@pytest.mark.parametrize(("interpolation", "decibels"), [("bilinear", 55), ("bicubic", 55)])
def test_resize_is_near_the_float_kernel_and_does_not_alias(interpolation: CropInterpolation, decibels: float):
    image = np.array(photograph("china"))
    exact = torch.nn.functional.interpolate(
        torch.from_numpy(image).permute(2, 0, 1)[None].double(), size=(150, 224), mode=interpolation, antialias=True
    )
    exact = exact[0].permute(1, 2, 0).numpy().clip(0, 255)
    assert psnr(resize(image, height=150, width=224, interpolation=interpolation), exact) > decibels
    stripes = np.zeros((64, 64, 3), dtype=np.uint8)
    stripes[:, ::2] = 255  # a kernel without antialiasing would return black or white
    # Stripes of one pixel leave grey, but for the columns at the edges, whose kernel is cut off
    grey = resize(stripes, height=16, width=16, interpolation=interpolation)[:, 2:-2]
    assert np.abs(grey.astype(int) - 127).max() <= 1


def test_a_square_of_the_right_size_is_left_alone():
    image = noise(32, 32)
    np.testing.assert_array_equal(resize(image, height=32, width=32), image)


def test_a_crop_is_resized_as_if_it_were_an_image_of_its_own():
    """A crop is a view with the whole image's strides."""
    image = noise(60, 80)
    np.testing.assert_array_equal(
        resize(image[5:45, 7:70], height=16, width=16), resize(image[5:45, 7:70].copy(), height=16, width=16)
    )


# ---- training


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_training_crops_resizes_and_flips_by_number_22(interpolation: CropInterpolation):
    """Numbers added since stand behind it: seeds keep their crops and flips."""
    transform = TrainTransform(16, crop_area=(0.2, 0.7), interpolation=interpolation)
    image = noise(50, 70)
    for seed in range(30):
        draws = draws_for(seed)
        box = random_crop(50, 70, area=(0.2, 0.7), ratio=RATIO, draws=draws)
        square, mirror = transform(held(image), draws=draws)
        crop = image[box.top : box.bottom, box.left : box.right]
        np.testing.assert_array_equal(square, resize(crop, height=16, width=16, interpolation=interpolation))
        assert mirror is bool(draws[22] < 0.5)
        shorter = uniforms(seed, draws=23)[0]
        assert random_crop(50, 70, area=(0.2, 0.7), ratio=RATIO, draws=shorter) == box and shorter[22] == draws[22]


def test_a_training_sample_is_full_decode_and_crop_within_55_db():
    data = jpeg(photograph("flower"))
    whole = np.array(Image.open(io.BytesIO(data)))
    transform = TrainTransform(224)
    for seed in range(12):
        square, _ = transform(read_image(data), draws=draws_for(seed))
        box = random_crop(*whole.shape[:2], area=AREA, ratio=RATIO, draws=draws_for(seed))
        crop = torch.from_numpy(whole[box.top : box.bottom, box.left : box.right].copy()).permute(2, 0, 1)[None]
        exact = torch.nn.functional.interpolate(crop.float(), size=(224, 224), mode="bilinear", antialias=True)
        assert psnr(square, exact[0].permute(1, 2, 0).numpy()) > 55


def test_only_the_crop_is_decoded():
    asked: list[Box] = []

    def decode(box: Box) -> Pixels:
        asked.append(box)
        return noise(box.height, box.width)

    TrainTransform(16)(EncodedImage(50, 70, decode=decode), draws=draws_for(4))
    assert asked == [random_crop(50, 70, area=AREA, ratio=RATIO, draws=draws_for(4))]


def test_rand_augment_comes_after_the_resize_with_the_last_number():
    augment, image = RandAugment(2, 9), held(np.array(photograph("china").crop((0, 0, 200, 150))))
    plain, augmented = TrainTransform(32), TrainTransform(32, rand_augment=augment)
    changed = 0
    for seed in range(20):
        draws = draws_for(seed)
        square, mirror = plain(image, draws=draws)
        result, same_mirror = augmented(image, draws=draws)
        np.testing.assert_array_equal(result, augment(square, draw=float(draws[23])))
        changed += not np.array_equal(result, square)
        assert mirror == same_mirror and len(draws) == 24
    assert changed > 15


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


def test_big_vision_evaluation_is_near_the_mean_of_areas():
    """TensorFlow's "area" is the mean over each output pixel's area; here 2 x 2 and 3 x 3 pixels, no fractions."""
    for factor in (2, 3):
        image = np.array(photograph("china").crop((0, 0, 192, 192)).resize((64 * factor, 64 * factor)))
        means = image.reshape(64, factor, 64, factor, 3).mean(axis=(1, 3))
        ours = EvalTransform(56, protocol="big_vision")(held(image))
        assert psnr(ours, means[4:60, 4:60]) > 28


@law
@given(SIDES, SIDES, st.sampled_from(["vit", "big_vision", "timm"]), st.sampled_from([8, 15, 16]), st.floats(0.3, 1))
def test_every_protocol_gives_the_square_from_the_middle(
    height: int, width: int, protocol: EvalProtocol, size: int, share: float
):
    height, width = 1 + height // 20, 1 + width // 20
    image = np.zeros((height, width, 3), dtype=np.uint8)
    image[: height // 2, :, 0] = 255
    image[:, : width // 2, 1] = 255
    square = EvalTransform(size, protocol=protocol, crop_share=None if protocol == "vit" else share)(held(image))
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

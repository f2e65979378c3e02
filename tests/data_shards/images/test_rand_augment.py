"""RandAugment: ranges timm to the bit, big_vision as described; image and number alone decide what it does."""

import random
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage
from timm.data.auto_augment import rand_augment_transform

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images import rand_augment
from shardvit.data_shards.images.rand_augment import OPERATIONS, RandAugment, apply_big_visions
from shardvit.data_shards.order.randomness import uniforms


def picture(size: int = 48) -> np.ndarray:
    y, x = np.mgrid[0:size, 0:size] / size
    waves = np.sin(x * 20) * np.cos(y * 13)
    return (np.stack([x, (waves + 1) / 2, y], axis=2) * 220 + 15).astype(np.uint8)


def draws(count: int) -> list[float]:
    return uniforms(1, 2, draws=count)[0].tolist()


@pytest.mark.parametrize(("num_ops", "magnitude"), [(1, 3), (2, 9), (2, 15), (3, 20)])
def test_it_is_timms_with_the_documented_string(num_ops: int, magnitude: int):
    augment = RandAugment(num_ops, magnitude)
    theirs = rand_augment_transform(f"rand-m{magnitude}-n{num_ops}-p1-mmax{max(magnitude, 10)}")
    for draw in draws(30):
        seed = int(draw * 2**53)
        random.seed(seed)
        np.random.seed(seed >> 21)
        expected = np.asarray(theirs(Image.fromarray(picture())))
        ours = augment(picture(), draw=draw)
        assert ours.dtype == np.uint8 and ours.flags.c_contiguous and ours.flags.writeable
        np.testing.assert_array_equal(ours, expected)


def test_the_string_means_what_the_docstring_says():
    operations = rand_augment._timms(RandAugment(2, 15).timm_config)
    names = [operation.name for operation in operations.ops]
    google = "AutoContrast Equalize Invert Rotate Posterize Solarize Color Contrast Brightness Sharpness ShearX ShearY"
    assert sorted(names) == sorted([*google.split(), "TranslateXRel", "TranslateYRel", "SolarizeAdd"])
    assert operations.num_layers == 2 and operations.choice_weights is None
    for operation in operations.ops:
        assert (operation.prob, operation.magnitude, operation.magnitude_max) == (1, 15, 15)
        assert operation.magnitude_std == 0 and operation.kwargs["fillcolor"] == (128, 128, 128)


def test_both_global_generators_are_left_alone():
    def states() -> tuple[object, bytes, int]:
        numpy_state = np.random.get_state(legacy=False)["state"]
        return random.getstate(), numpy_state["key"].tobytes(), numpy_state["pos"]

    before = states()
    RandAugment(2, 9)(picture(), draw=0.3)
    assert states() == before


def test_threads_at_work_side_by_side_do_not_mix_their_numbers():
    augment, many = RandAugment(3, 9), draws(60)
    alone = [augment(picture(), draw=draw) for draw in many]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            together = list(threads.map(lambda draw: augment(picture(), draw=draw), many))
    finally:
        sys.setswitchinterval(before)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


def test_every_operation_works_at_every_strength():
    """timm's posterize keeps 0 bits below m = 3, which Pillow refuses and Google's code turns black."""
    for magnitude in (0, 1, 2, 3, 10, 20, 30):
        for operation in rand_augment._timms(RandAugment(1, magnitude).timm_config).ops:
            result = np.asarray(operation(Image.fromarray(picture())))
            assert result.shape == (48, 48, 3)
            if operation.name == "Posterize":
                assert (result == 0).all() == (magnitude < 3)


@pytest.mark.parametrize(("num_ops", "magnitude"), [(0, 9), (2, -1), (2, 9.5)])
def test_numbers_that_mean_nothing_are_refused(num_ops: int, magnitude: int):
    with pytest.raises(UserError, match="rand_augment: num_ops"):
        RandAugment(num_ops, magnitude)


def test_a_worker_does_not_load_all_of_timm():
    script = (
        "import sys, numpy\nfrom shardvit.data_shards.images.rand_augment import RandAugment\n"
        "RandAugment(2, 9)(numpy.zeros((8, 8, 3), dtype=numpy.uint8), draw=0.5)\n"
        "assert not {'timm', 'torch'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240, cwd=Path(rand_augment.__file__).parents[2])


# ---- big_vision's


def plain(name: str, image: np.ndarray, *, magnitude: int, draw: list[float]) -> np.ndarray:
    """The operations that move nothing, in numpy, from their description."""
    pixels, share = image.astype(float), magnitude / 10
    factor = 0.1 + 1.8 * share
    height, width = image.shape[:2]
    match name:
        case "Posterize":
            kept = int(4 * share) if 1 <= int(4 * share) <= 8 else 1
            return image >> (8 - kept) << (8 - kept)
        case "Solarize":
            return np.where(image < int(256 * share) % 256, image, 255 - image)
        case "SolarizeAdd":
            return np.where(image < 128, np.minimum(pixels + int(110 * share), 255), image)
        case "Contrast":
            level = min(255, height * width // 256)
            return (level + factor * (pixels - level)).clip(0, 255)
        case "Brightness":
            return (factor * pixels).clip(0, 255)
        case "Invert":
            return 255 - image
        case "Color":
            grey = (pixels @ [0.299, 0.587, 0.114])[..., None]
            return (grey + factor * (pixels - grey)).clip(0, 255)
        case "Sharpness":
            smooth, kernel = pixels.copy(), np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13
            smooth[1:-1, 1:-1] = ndimage.correlate(pixels, kernel[..., None])[1:-1, 1:-1]
            return (smooth + factor * (pixels - smooth)).clip(0, 255)
        case "AutoContrast":
            low, high = pixels.min(axis=(0, 1)), pixels.max(axis=(0, 1))
            return (pixels - low) * 255 / (high - low)
        case "Equalize":
            result = image.copy()
            for channel in range(3):
                counts = np.bincount(image[..., channel].ravel(), minlength=256)
                step = (counts.sum() - counts[counts > 0][-1]) // 255
                table = (np.cumsum(counts) - counts + step // 2) // step
                result[..., channel] = table.clip(0, 255)[image[..., channel]]
            return result
        case "Cutout":
            reach, result = int(40 * share), image.copy()
            row, column = np.mgrid[0:height, 0:width]
            top, left = int(draw[1] * height), int(draw[2] * width)
            inside = (row >= top - reach) & (row < top + reach) & (column >= left - reach) & (column < left + reach)
            result[inside] = 128
            return result
        case _:
            raise ValueError(name)


MOVES = {"ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"}


@pytest.mark.parametrize("name", sorted({*OPERATIONS} - MOVES))
@pytest.mark.parametrize("magnitude", [0, 2, 5, 9, 10, 15, 20, 30])
def test_big_visions_strengths(name: str, magnitude: int):
    """Within the level by which Pillow rounds and TensorFlow cuts off; what it blends with is rounded, too."""
    draw, image = [0.2, 0.3, 0.9], picture()
    ours = apply_big_visions(name, Image.fromarray(image), magnitude=magnitude, draws=draw)
    expected = plain(name, image, magnitude=magnitude, draw=draw)
    blended = abs(1 - (0.1 + 0.18 * magnitude)) if name in ("Color", "Sharpness") else 0
    np.testing.assert_allclose(np.asarray(ours, dtype=float), expected, atol=1.01 + blended)
    np.testing.assert_array_equal(image, picture())


@pytest.mark.parametrize("name", ["ShearX", "ShearY", "Rotate"])
@pytest.mark.parametrize(("sign", "share"), [(0.2, -0.7), (0.7, 0.7), (0.7, 1.3)])
def test_big_visions_angles(name: str, sign: float, share: float):
    """Against scipy's nearest pixels; no shear of these lands on exact halves, where each chooses its own."""
    image, level, angle = picture(), 0.3 * share, np.deg2rad(30 * share)
    turn = [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
    matrix = np.array({"ShearX": [[1, 0], [level, 1]], "ShearY": [[1, level], [0, 1]], "Rotate": turn}[name])
    still = np.full(2, 23.5) if name == "Rotate" else np.zeros(2)
    options = {"offset": still - matrix @ still, "order": 0, "mode": "grid-constant", "cval": 128}
    expected = np.stack([ndimage.affine_transform(image[..., c], matrix, **options) for c in range(3)], axis=2)
    magnitude = round(10 * abs(share))
    ours = apply_big_visions(name, Image.fromarray(image), magnitude=magnitude, draws=[sign, 0, 0])
    assert (np.asarray(ours) == expected).all(axis=2).mean() > 0.97


@pytest.mark.parametrize(
    ("name", "shift"), [("TranslateX", (0, 30)), ("TranslateY", (30, 0)), ("Rotate", None), ("ShearX", None)]
)
def test_big_visions_moves_go_both_ways_and_leave_grey(name: str, shift: tuple[int, int] | None):
    """Shifts are in pixels: 10 m, whatever the image's size; nothing is interpolated."""
    image, grey = picture(64), (128, 128, 128)
    one, other = (
        np.asarray(apply_big_visions(name, Image.fromarray(image), magnitude=3, draws=[sign, 0, 0]))
        for sign in (0.2, 0.7)
    )
    assert not np.array_equal(one, other)
    for moved in (one, other):
        colours = {tuple(colour) for colour in moved.reshape(-1, 3).tolist()}
        assert grey in colours and colours - {grey} <= {tuple(colour) for colour in image.reshape(-1, 3).tolist()}
    if shift is not None:
        down, right = shift
        np.testing.assert_array_equal(other[: 64 - down, : 64 - right], image[down:, right:])
        np.testing.assert_array_equal(one[down:, right:], image[: 64 - down, : 64 - right])


def test_all_of_big_visions_operations_come_about_equally_often(monkeypatch: pytest.MonkeyPatch):
    chosen: Counter[str] = Counter()
    signs: list[float] = []

    def count(name: str, image: Image.Image, *, magnitude: int, draws: list[float]) -> Image.Image:
        chosen[name] += 1
        signs.append(draws[0])
        return image

    monkeypatch.setattr(rand_augment, "apply_big_visions", count)
    for draw in draws(1600):
        RandAugment(2, 9, "big_vision")(picture(4), draw=draw)
    assert set(chosen) == set(OPERATIONS) and len(OPERATIONS) == 16 and chosen.total() == 3200
    assert all(abs(count - 200) < 5 * 200**0.5 for count in chosen.values())
    assert abs(np.mean(signs) - 0.5) < 0.03


def test_big_visions_pixels_are_a_function_of_the_number_and_no_generator_moves():
    augment, image = RandAugment(3, 5, "big_vision"), picture(128)
    random.seed(1)
    before = random.getstate()
    results = [augment(image, draw=draw) for draw in draws(40)]
    assert random.getstate() == before
    for result, draw in zip(results, draws(40), strict=True):
        np.testing.assert_array_equal(result, augment(image, draw=draw))
        assert result.dtype == np.uint8 and result.flags.c_contiguous and result.flags.writeable
    assert len({result.tobytes() for result in results}) > 25
    np.testing.assert_array_equal(image, picture(128))

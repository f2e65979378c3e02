"""AutoAugment by timm's strings: timm's own transform to the bit, its operations and magnitudes as the string says."""

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy import stats
from timm.data import create_transform

from shardvit.data_shards.images import auto_augment
from shardvit.data_shards.images.auto_augment import AutoAugment
from shardvit.data_shards.images.crops import DRAWS_PER_SAMPLE, FLIP_DRAW, RAND_AUGMENT_DRAW
from shardvit.data_shards.images.transforms import TrainTransform
from shardvit.data_shards.order.randomness import uniforms
from tests.data_shards.images.test_rand_augment import draws, picture
from tests.data_shards.images.test_transforms import held

MEAN, FILL = (0.485, 0.456, 0.406), (124, 116, 104)
POLICIES = ["original", "originalr", "v0", "v0r-mstd1.5", "3a", "rand-m9-mstd0.5-inc1", "rand-m7-n3-p0.9-tweights"]


def timms(policy: str, *, interpolation: str) -> Any:
    """The part of timm's training transform between the flip and the tensor."""
    return create_transform(
        48,
        is_training=True,
        auto_augment=policy,
        interpolation=interpolation,
        color_jitter=None,
        mean=MEAN,
        separate=True,
    )[1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("interpolation", ["bicubic", "random"])
def test_it_is_timms_transform_on_the_same_numbers(policy: str, interpolation: str):
    ours, theirs = AutoAugment(policy, interpolation, FILL), timms(policy, interpolation=interpolation)
    changed = 0
    for draw in draws(40):
        seed, before = int(draw * 2**53), Image.fromarray(picture())
        random.seed(seed)
        np.random.seed(seed >> 21)
        found = np.asarray(ours(before, draw=draw))
        random.seed(seed)
        np.random.seed(seed >> 21)
        try:
            expected = np.asarray(theirs(before))
        except ValueError:  # timm asks Pillow to keep no bit
            continue
        np.testing.assert_array_equal(found, expected)
        changed += not np.array_equal(found, picture())
    assert changed > 15


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_a_mirrored_image_is_augmented_after_the_mirroring_as_by_timm(flip: float):
    """timm's shear along y keeps the left edge of the mirrored image."""
    image = picture(48)
    transform = TrainTransform(48, crop_area=(1, 1), crop_ratio=(1, 1), flip=flip, auto_augment=AutoAugment("v0"))
    for row in uniforms(5, np.arange(20), draws=DRAWS_PER_SAMPLE):
        found, mirrored = transform(held(image), draws=row)
        assert mirrored == (flip == 1)
        shown = Image.fromarray(image[:, ::-1] if flip else image)
        expected = np.asarray(AutoAugment("v0")(shown, draw=float(row[RAND_AUGMENT_DRAW])))
        np.testing.assert_array_equal(found[:, ::-1] if flip else found, expected)


def recorded(augment: AutoAugment, *, count: int) -> list[tuple[str, tuple[Any, ...]]]:
    """The operations and arguments of many images, of which none is done."""
    transform: Any = auto_augment._timms.__wrapped__(augment)
    found: list[tuple[str, tuple[Any, ...]]] = []

    def note(name: str, *arguments: Any) -> Any:
        found.append((name, arguments[1:]))
        return arguments[0]

    operations = transform.ops if hasattr(transform, "ops") else [op for policy in transform.policy for op in policy]
    for op in operations:
        op.aug_fn = lambda *arguments, name=op.name, **options: note(name, *arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_augment, "_timms", lambda given: transform)
        for draw in uniforms(8, np.arange(count), draws=1)[:, 0].tolist():
            augment(Image.fromarray(picture(4)), draw=draw)
    return found


def test_3_augments_operations_are_equally_often_and_the_papers():
    found = recorded(AutoAugment("3a"), count=1500)
    counts = Counter(name for name, _ in found)
    assert sorted(counts) == ["Desaturate", "GaussianBlurRand", "Solarize"] and len(found) == 1500
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3
    assert {arguments for name, arguments in found if name == "Solarize"} == {(128,)}
    assert {arguments for name, arguments in found if name == "Desaturate"} == {(1.0,)}  # without colour


def test_rand_augments_operations_and_their_noise_follow_its_string():
    found = recorded(AutoAugment("rand-m9-mstd0.5-inc1"), count=4000)
    counts = Counter(name for name, _ in found)
    assert len(counts) == 15 and stats.chisquare(list(counts.values())).pvalue > 1e-3
    assert stats.binomtest(len(found), 2 * 4000, 0.5).pvalue > 1e-3  # n2, p0.5
    turns = np.array([abs(arguments[0]) / 3 for name, arguments in found if name == "Rotate"])  # 3 degrees each
    below = turns[turns < 10]
    normal = stats.norm(9, 0.5)
    assert stats.kstest(below, lambda x: normal.cdf(x) / normal.cdf(10)).pvalue > 1e-3
    assert turns.max() == 10  # where timm clips


def test_where_no_bit_is_kept_the_image_is_black():
    transform: Any = auto_augment._timms(AutoAugment("rand-m10-inc1-p1"))
    (posterize,) = (op for op in transform.ops if op.name == "PosterizeIncreasing")
    assert not np.asarray(posterize(Image.fromarray(picture()))).any()


def test_it_depends_on_its_own_number_alone():
    transform = TrainTransform(24, auto_augment=AutoAugment("rand-m9-mstd0.5-inc1-p1"))
    image, row = held(picture(64)), uniforms(1, draws=DRAWS_PER_SAMPLE)[0]
    first = transform(image, draws=row)[0]
    random.seed(0)
    np.testing.assert_array_equal(first, transform(image, draws=row)[0])
    for column in range(FLIP_DRAW + 2, DRAWS_PER_SAMPLE):
        changed = row.copy()
        changed[column] = 0.9
        np.testing.assert_array_equal(first, transform(image, draws=changed)[0])


def test_a_worker_does_not_load_all_of_timm():
    script = (
        "import sys, PIL.Image\nfrom shardvit.data_shards.images.auto_augment import AutoAugment\n"
        "from shardvit.data_shards.images.color_jitter import ColorJitter\n"
        "ColorJitter(0.3, 0.3, 0.3, 0.1)(AutoAugment('3a')(PIL.Image.new('RGB', (8, 8)), draw=0.5), draw=0.5)\n"
        "assert not {'timm', 'torch', 'torchvision'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240, cwd=Path(auto_augment.__file__).parents[2])


def test_timm_jitters_colours_after_3_augment_as_deit_3_does():
    """`create_transform` with 3a and colour jitter, as timm describes facebookresearch/deit's augment.py."""
    names = [type(each).__name__ for each in timms("3a", interpolation="bicubic").transforms]
    assert names == ["AutoAugment"]
    both = create_transform(48, is_training=True, auto_augment="3a", color_jitter=0.3, separate=True)[1]
    assert [type(each).__name__ for each in both.transforms] == ["AutoAugment", "ColorJitter"]  # in this order

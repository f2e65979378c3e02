"""Lengths of training: what may be written, and that the steps are the nearest whole number."""

import math
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardvit.pipeline.recipe.duration import Duration, in_steps, parse_duration


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("400 steps", 400, "steps"),
        ("1 step", 1, "steps"),
        ("400steps", 400, "steps"),
        ("  7 epochs ", 7, "epochs"),
        ("1 epoch", 1, "epochs"),
        ("0.5 epochs", 0.5, "epochs"),
        ("1e6 images", 1e6, "images"),
        ("1.5E+3 image", 1500, "images"),
        ("1_281_167 images", 1281167, "images"),
        ("10%", 10, "%"),
        ("2.5 %", 2.5, "%"),
        ("0 steps", 0, "steps"),
    ],
)
def test_forms(text: str, amount: float, unit: str):
    assert parse_duration(text) == Duration(amount=amount, unit=unit)


BAD = ["", "steps", "400", "-5 steps", "4 minutes", "10 % steps", "1,000 steps", "nan steps", "inf steps", "4 stepss"]


@pytest.mark.parametrize("text", [*BAD, "1e400 images", "1e-3 epochs", "_1 steps", "4\nsteps and more"])
def test_what_is_no_duration_is_refused_with_examples(text: str):
    with pytest.raises(ValueError, match=r"400 steps.*7 epochs.*1e6 images.*10%"):
        parse_duration(text)


def nearest(exact: Fraction) -> int:
    """Rounding half up, in exact arithmetic."""
    return max(1, math.floor(exact + Fraction(1, 2)))


@example(amount=28, batch=1, samples=1, total=50)  # 29% of 50 is 14.5 exactly, and less in careless floats
@given(st.integers(1, 10**7), st.integers(1, 8192), st.integers(1, 10**8), st.integers(1, 10**6))
def test_steps_are_the_nearest_whole_number(amount: int, batch: int, samples: int, total: int):
    def steps(unit: str, number: int) -> int:
        return in_steps(
            parse_duration(f"{number} {unit}"), global_batch_images=batch, samples_per_epoch=samples, total_steps=total
        )

    assert steps("steps", amount) == amount
    assert steps("images", amount) == nearest(Fraction(amount, batch))
    assert steps("epochs", amount % 300 + 1) == nearest(Fraction((amount % 300 + 1) * samples, batch))
    assert steps("%", amount % 100 + 1) == nearest(Fraction((amount % 100 + 1) * total, 100))


def test_known_lengths():
    # ViT paper, Table 3: 300 epochs of ImageNet's 1,281,167 images at batch 4096 (93,835.2... steps).
    imagenet = {"global_batch_images": 4096, "samples_per_epoch": 1_281_167}
    assert in_steps(parse_duration("300 epochs"), **imagenet) == 93_835
    assert in_steps(parse_duration("10%"), **imagenet, total_steps=93_835) == 9_384  # 9,383.5
    assert in_steps(parse_duration("1 images"), **imagenet) == 1
    assert in_steps(parse_duration("0 epochs"), **imagenet) == 0
    assert in_steps(parse_duration("0%"), **imagenet, total_steps=5) == 0


def test_a_percentage_of_nothing_is_refused():
    with pytest.raises(ValueError, match="cannot be a percentage: give steps, epochs or images"):
        in_steps(parse_duration("10%"), global_batch_images=4, samples_per_epoch=8)

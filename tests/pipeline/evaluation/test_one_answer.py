"""A model that gives one answer to everything is named, and nobody else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from pipeline.evaluation.scores import one_answer
from pipeline.runs.evaluations import Evaluation, PerClass


def evaluated(images: Sequence[int], answers: Sequence[int], *, set_name: str = "val") -> Evaluation:
    """Of so many images of each class, and so many answers."""
    counts = np.array(images)
    return Evaluation(
        set_name=set_name,
        classes=("cat", "do\x1bg", "owl"),
        label_kind="single",
        images=int(counts.sum()),
        metrics={"val/loss": 1.0},
        per_class=PerClass(counts, counts, np.ones(3), answers=np.array(answers)),
        confusion=None,
        calibration=None,
        mistakes=(),
        examples=(),
    )


@pytest.mark.parametrize(
    ("images", "answers", "warns"),
    [
        ([30, 30, 40], [0, 0, 100], True),
        ([30, 30, 40], [100, 0, 0], True),  # not even the commonest
        ([30, 30, 40], [5, 0, 95], True),
        ([30, 30, 40], [6, 0, 94], False),
        ([0, 3, 97], [0, 3, 97], False),  # the images are like that
        ([0, 3, 97], [0, 0, 100], True),
        ([0, 0, 100], [0, 0, 100], False),
        ([0, 0, 0], [0, 0, 0], False),
    ],
)
def test_nearly_all_answers_are_one_class(images: list[int], answers: list[int], warns: bool) -> None:
    assert bool(one_answer(evaluated(images, answers))) == warns


def test_the_warning_names_class_and_counts_and_nothing_hostile() -> None:
    text = one_answer(evaluated([20, 1214, 766], [0, 2000, 0]))
    assert "2,000 of 2,000" in text and "60.7 %" in text and "held-out" in text
    assert "\x1b" not in text and "g'" in text
    assert "new" in one_answer(evaluated([1, 1, 0], [2, 0, 0], set_name="new"))


def test_numbers_that_are_not_finite_and_older_evaluations_are_no_answers() -> None:
    one = evaluated([5, 5, 0], [10, 0, 0])
    assert one_answer(one)
    assert not one_answer(replace(one, metrics={"val/loss": math.nan}))
    assert not one_answer(replace(one, per_class=replace(one.per_class, answers=None)))

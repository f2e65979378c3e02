"""Evaluations made of labels and probabilities that a test draws, by direct counting."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from shardvit.pipeline.runs.evaluations import Calibration, Evaluation, Judged, PerClass

HOSTILE = (
    "<script>alert(1)</script>",
    r"$\frac$",
    "a\x1b[2J\x00\nb",
    "x" * 500,
    "\u202eاسم الصنف",
    "😀🫠",
    "犬と猫",
    "c\udcff",
    "",
    'quoted "& co',
)


def evaluation_of(
    true: Sequence[int] | np.ndarray,
    probabilities: np.ndarray,
    *,
    classes: Sequence[str],
    keys: Sequence[str] | None = None,
) -> Evaluation:
    """Of images with one label each; `probabilities` [n, C]. The keys are the numbers unless given."""
    true, size = np.asarray(true, dtype=np.int64), len(classes)
    predicted, sure = probabilities.argmax(axis=1), probabilities.max(axis=1)
    hit = predicted == true
    confusion = np.zeros((size, size), dtype=np.int64)
    for one, other in zip(true, predicted, strict=True):
        confusion[one, other] += 1
    images, right = confusion.sum(axis=1), np.diag(confusion).copy()
    edges = np.linspace(0, 1, 16)
    inside = [(sure > low) & (sure <= high) for low, high in pairwise(edges)]

    def mean(values: np.ndarray, where: np.ndarray) -> float:
        return float(values[where].mean()) if where.any() else np.nan

    judged = [
        Judged(
            sample=number,
            key=keys[number] if keys else str(number),
            true=(int(true[number]),),
            predicted=int(predicted[number]),
            probability=float(sure[number]),
            probability_of_true=float(probabilities[number, true[number]]),
            top=tuple(
                (int(each), float(probabilities[number, each])) for each in np.argsort(-probabilities[number])[:5]
            ),
        )
        for number in range(len(true))
    ]
    return Evaluation(
        set_name="val",
        classes=tuple(classes),
        label_kind="single",
        images=len(true),
        metrics={"val/top1": mean(hit, np.ones(len(true), dtype=bool))},
        per_class=PerClass(images, right, np.divide(right, images, out=np.full(size, np.nan), where=images > 0)),
        confusion=confusion,
        calibration=Calibration(
            edges,
            np.array([mean(sure, where) for where in inside]),
            np.array([mean(hit, where) for where in inside]),
            np.array([where.sum() for where in inside], dtype=np.int64),
        ),
        mistakes=tuple(sorted((each for each in judged if each.predicted not in each.true), key=_doubt))[:64],
        examples=tuple(judged[:64]),
    )


def random_evaluation(*, classes: Sequence[str], images: int, seed: int = 0, skill: float = 1.0) -> Evaluation:
    """`skill`: 0 guesses, 3 is nearly always right."""
    draw = np.random.default_rng(seed)
    true = draw.integers(0, len(classes), images)
    logits = draw.normal(size=(images, len(classes)))
    logits[np.arange(images), true] += skill
    shares = np.exp(2 * logits)
    return evaluation_of(true, shares / shares.sum(axis=1, keepdims=True), classes=classes)


def _doubt(judged: Judged) -> float:
    return -judged.probability

"""Compute metrics from per-image results on the host: numpy, exact, independent of image order.

Counts are integers; sums of losses and probabilities are rounded once (`math.fsum`). Takes milliseconds for 50,000
images. A confusion matrix of C classes takes 8 C^2 bytes, so it stops at 1,000 classes.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.text import one_line
from shardvit.pipeline.runs.evaluations import (
    CALIBRATION_BINS,
    MOST_CONFUSED_CLASSES,
    OWN_SET,
    Calibration,
    Counts,
    Evaluation,
    Floats,
    PerClass,
)


@dataclass(frozen=True)
class Answered:
    """The images that count, in set order; arrays [n]."""

    sample: Counts  # number in the set
    loss: Floats
    right: Floats
    predictions: Floats
    rank: Counts  # of the best-scored true class; from here on empty without classes
    true: Counts
    predicted: Counts
    probability: Floats  # of the predicted class
    probability_of_true: Floats

    @property
    def images(self) -> int:
        return len(self.sample)


def mean_loss(answered: Answered) -> float:
    """Mean over all predictions; NaN without any."""
    predictions = answered.predictions.sum()
    return math.fsum(answered.loss) / predictions if predictions else math.nan


def share_right(answered: Answered) -> float:
    """Share of right predictions; NaN without any."""
    predictions = answered.predictions.sum()
    return float(answered.right.sum() / predictions) if predictions else math.nan


def top_share(answered: Answered, *, k: int) -> float:
    """Share of images whose true class is among the k best-scored; NaN without any."""
    return int((answered.rank < k).sum()) / answered.images if answered.images else math.nan


def per_class(answered: Answered, *, num_classes: int) -> PerClass:
    """Count by class for single-label images."""
    images = np.bincount(answered.true, minlength=num_classes)
    right = np.bincount(answered.true[answered.rank == 0], minlength=num_classes)
    return PerClass(images, right, shares(right, of=images))


def balanced_accuracy(classes: PerClass) -> float:
    """Mean accuracy over the classes that have images; NaN without any."""
    known = classes.accuracy[classes.images > 0]
    return math.fsum(known) / len(known) if len(known) else math.nan


def confusion_matrix(answered: Answered, *, num_classes: int) -> Counts | None:
    """[C, C], rows true, columns predicted; None above `MOST_CONFUSED_CLASSES`."""
    if num_classes > MOST_CONFUSED_CLASSES:
        return None
    pairs = answered.true * num_classes + answered.predicted
    return np.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)


def calibration(answered: Answered) -> Calibration:
    """Bin by the predicted class's probability: 15 equal bins, (lower, upper] (Guo et al., arXiv 1706.04599)."""
    edges = np.linspace(0.0, 1.0, CALIBRATION_BINS + 1)
    bins = np.clip(np.searchsorted(edges, answered.probability, side="left") - 1, 0, CALIBRATION_BINS - 1)
    images = np.bincount(bins, minlength=CALIBRATION_BINS)
    right = np.bincount(bins[answered.rank == 0], minlength=CALIBRATION_BINS)
    confidence = np.array([math.fsum(answered.probability[bins == each]) for each in range(CALIBRATION_BINS)])
    return Calibration(edges, shares(confidence, of=images), shares(right, of=images), images)


def calibration_error(found: Calibration) -> float:
    """Mean distance between confidence and accuracy over the bins, weighted by images; NaN without images."""
    used = found.images > 0
    distance = np.abs(found.confidence - found.accuracy)[used] * found.images[used]
    return math.fsum(distance) / int(found.images.sum()) if used.any() else math.nan


def worst(answered: Answered, *, count: int) -> Counts:
    """Samples of the wrong answers, most confident first."""
    wrong = np.flatnonzero(answered.rank > 0)
    order = np.lexsort((answered.sample[wrong], -answered.probability[wrong]))
    return answered.sample[wrong[order[:count]]]


def shares(part: NDArray[np.int64] | Floats, *, of: Counts) -> Floats:
    """Divide element by element; NaN where `of` is 0."""
    return np.divide(part, of, out=np.full(len(of), math.nan), where=of > 0)


def average_precision(scores: Floats, *, positive: NDArray[np.bool_]) -> float:
    """scikit-learn's average precision of one class, not interpolated; NaN without positives, NaN scores rank last."""
    if not positive.any():
        return math.nan
    from sklearn.metrics import average_precision_score  # takes a second

    _, places = np.unique(np.nan_to_num(scores, nan=-np.inf, posinf=np.inf, neginf=-np.inf), return_inverse=True)
    return float(average_precision_score(positive, places))  # ranks suffice, and are finite


_MOST = 0.95  # of the answers


def one_answer(evaluation: Evaluation) -> str:
    """Warn if 95 % of the answers are one class (100 % if 95 % of the images are), unless all images are; else ""."""
    images, answers = evaluation.images, evaluation.per_class.answers
    if not images or answers is None or not all(map(math.isfinite, evaluation.metrics.values())):
        return ""
    best, commonest = int(answers.argmax()), int(evaluation.per_class.images.max()) / images
    if commonest == 1 or answers[best] < (images if commonest >= _MOST else _MOST * images):
        return ""
    own = int(evaluation.per_class.images[best]) / images
    which = "the held-out images" if evaluation.set_name == OWN_SET else one_line(evaluation.set_name)
    return (
        f"warning: {answers[best]:,} of {images:,} answers on {which} are the class "
        f"{one_line(evaluation.classes[best])!r}, which {100 * own:.1f} % of them have: the model does not tell the "
        "classes apart"
    )

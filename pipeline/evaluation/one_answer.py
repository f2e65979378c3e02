"""Whether a classifier gives one answer to everything: its top-1, however high, is then the share of that class."""

from __future__ import annotations

import math

from data_shards.text import one_line
from pipeline.runs.evaluations import OWN_SET, Evaluation

_MOST = 0.95  # of the answers


def one_answer(evaluation: Evaluation) -> str:
    """A warning if all answers, or 95 % of them, are one class; "": they are not, or the images are of one class
    themselves. Of a set in which a class has 95 % of the images only if all answers are one."""
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

"""Draw accuracy by class, worst first (table and figure), and over confidence (reliability diagram).

A class's score is the share of its images predicted correctly or, for multi-label sets, average precision. The diagram
has the evaluation's 15 equal bins of confidence; its error is Guo et al.'s (2017) expected calibration error: the mean
over images of their bin's distance from the diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.text import counted, one_line
from shardvit.pipeline.evaluation.scores import calibration_error
from shardvit.pipeline.pictures.confusion import row_shares
from shardvit.pipeline.pictures.evaluated import EvaluatedSet, brief, of_each_set, percent
from shardvit.pipeline.pictures.style import (
    ACCENT,
    BAD,
    INK,
    MUTED,
    PAPER,
    SERIES,
    Drawn,
    new_figure,
    plain,
    plain_numbers,
)
from shardvit.pipeline.runs.evaluations import Calibration, Evaluation
from shardvit.pipeline.runs.pictures import Cell, DrawRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_DOTS = 40  # up to this many classes, each has its line
_WORST = 12  # classes with a line, if there are more
_MEANING = {
    "accuracy": "Accuracy: share of a class's images that are predicted as it, in per cent.",
    "average precision": "Average precision: area below precision over recall of a class's probabilities, in per cent.",
}
_FEW = 20  # images in a bin; with fewer, its interval is over 40 points wide
_Z = 1.96  # of a two-sided 95 % interval

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ClassScore:
    """Score of one class."""

    number: int
    images: int
    score: float  # NaN without images
    confused_with: int | None = None  # most frequent wrong prediction
    confused_share: float = 0.0  # of its images


def class_scores(evaluation: Evaluation) -> list[ClassScore]:
    """Sort classes worst first, those without images last; ties: more images first."""
    per_class, confusion = evaluation.per_class, evaluation.confusion
    scores = per_class.accuracy if per_class.average_precision is None else per_class.average_precision
    scores = np.where(per_class.images > 0, scores, np.nan)
    others, shares = [0] * len(scores), [0.0] * len(scores)
    if confusion is not None and len(confusion) > 1:
        wrong = np.nan_to_num(row_shares(confusion) * ~np.eye(len(confusion), dtype=bool))
        others, shares = wrong.argmax(axis=1).tolist(), wrong.max(axis=1).tolist()
    order = np.lexsort((-per_class.images, scores)).tolist()  # NaN last
    return [
        ClassScore(at, int(per_class.images[at]), float(scores[at]), others[at] if shares[at] > 0 else None, shares[at])
        for at in order
    ]


@of_each_set
def draw_per_class_table(request: DrawRequest, one: EvaluatedSet) -> Drawn:
    """Tabulate all classes of each held-out set."""
    evaluation, name = one.evaluation, _score_name(one.evaluation)
    classes = [one_line(each) for each in evaluation.classes]
    scores = class_scores(evaluation)
    columns: dict[str, list[Cell]] = {
        "class": [classes[each.number] for each in scores],
        "images": [each.images for each in scores],
        f"{name}, %": [_rounded(each.score) for each in scores],
    }
    if evaluation.per_class.average_precision is not None:
        accuracy = evaluation.per_class.accuracy.tolist()
        columns["right, %"] = [_rounded(accuracy[each.number]) for each in scores]
    confused = ""
    if evaluation.confusion is not None:
        confused = " Taken for: the class that most of its mistakes name."
        others = [each.confused_with for each in scores]
        columns["taken for"] = ["" if other is None else classes[other] for other in others]
        columns["share, %"] = [None if each.confused_with is None else _rounded(each.confused_share) for each in scores]
    picture = one.picture(
        "per_class",
        "Classes, worst first",
        caption=f"{_MEANING[name]}{confused} Classes without held-out images stand last.",
        alt=_alt(evaluation, scores),
    )
    return picture, columns


@of_each_set
def draw_per_class(request: DrawRequest, one: EvaluatedSet) -> Drawn | None:
    """Draw the spread over classes of each held-out set with images of at least two."""
    scores, name = [each for each in class_scores(one.evaluation) if each.images], _score_name(one.evaluation)
    if len(scores) < 2:
        return None
    caption = _MEANING[name] + " Worst first; on the right: images of the class."
    if name == "accuracy":
        caption += " Bars: 95 % intervals."
    if len(scores) > _MOST_DOTS:
        caption += f" Above: all {len(scores):,} classes by rank; below: the {_WORST} worst."
    title, alt = f"{name.capitalize()} by class", _alt(one.evaluation, scores)
    picture = one.picture("class_scores", title, caption=caption, alt=alt)
    return picture, _spread(one.evaluation, scores)


def _score_name(evaluation: Evaluation) -> str:
    return "accuracy" if evaluation.per_class.average_precision is None else "average precision"


def _rounded(share: float) -> float | None:
    return round(100 * share, 2) if np.isfinite(share) else None


def _alt(evaluation: Evaluation, scores: list[ClassScore]) -> str:
    known = [each for each in scores if each.images]
    if not known:
        return f"{counted(len(scores), 'class')} without a held-out image."
    values = np.array([each.score for each in known])
    named = [f"{brief(evaluation.classes[each.number])} {percent(each.score)}" for each in (*known[:3], known[-1])]
    return (
        f"{_score_name(evaluation).capitalize()} of {counted(len(known), 'class')}: mean {percent(values.mean())}, "
        f"median {percent(float(np.median(values)))}. Worst: {', '.join(named[:-1])}; best: {named[-1]}."
    )


def _spread(evaluation: Evaluation, scores: list[ClassScore]) -> Figure:
    values = 100 * np.array([each.score for each in scores])
    mean = float(values.mean())
    line: dict[str, Any] = {"color": BAD, "linewidth": 1.2, "linestyle": "--"}
    label: dict[str, Any] = {"s": f"mean {percent(mean / 100)}", "va": "bottom", "color": BAD}
    if len(scores) <= _MOST_DOTS:
        figure, [[axes]] = new_figure(width=6.6, height=1.0 + 0.27 * len(scores))
        _draw_dots(axes, evaluation, scores)
        axes.axvline(mean, **line)
        axes.text(mean, 1.0, ha="right" if mean > 50 else "left", transform=axes.get_xaxis_transform(), **label)
        return figure
    heights = (2.0, 0.5 + 0.27 * _WORST)
    figure, [[top], [bottom]] = new_figure(width=6.6, height=0.6 + sum(heights), rows=2, height_ratios=heights)
    ranks = np.arange(1, len(values) + 1)
    top.fill_between(ranks, values, color=ACCENT, alpha=0.15, linewidth=0)
    top.plot(ranks, values, color=ACCENT)
    top.axhline(mean, **line)
    top.text(0.01, mean, transform=top.get_yaxis_transform(), **label)
    top.set(xlim=(1, len(values)), ylim=(0, 100), ylabel=f"{_score_name(evaluation)}, %", xlabel="class, worst first")
    plain_numbers(top.xaxis)
    top.grid(visible=True)
    _draw_dots(bottom, evaluation, scores[:_WORST])
    return figure


def _draw_dots(axes: Axes, evaluation: Evaluation, scores: list[ClassScore]) -> None:
    from matplotlib.ticker import MaxNLocator

    places = list(range(len(scores)))
    values = np.array([each.score for each in scores])
    least = values.min()
    if evaluation.per_class.average_precision is None:
        low, high = wilson_interval(values, np.array([each.images for each in scores]))
        least = low.min()
        axes.hlines(places, 100 * low, 100 * high, color=ACCENT, linewidth=1.4, alpha=0.55)
    axes.plot(100 * values, places, "o", color=ACCENT, markersize=6)
    right = {"transform": axes.get_yaxis_transform(), "ha": "right", "color": MUTED}
    for place, each in zip(places, scores, strict=True):
        axes.text(1.1, place, f"{each.images:,}", va="center_baseline", **right)
    axes.text(1.1, -0.6, "images", va="bottom", **right)
    axes.set_yticks(places, [plain(evaluation.classes[each.number], longest=26) for each in scores])
    start = 10 * (10 * least // 1) if least > 0.3 else 0  # dots need no zero; include it if it is near
    margin, label = 0.02 * (100 - start), f"{_score_name(evaluation)}, %"
    axes.set(xlim=(start - margin, 100 + margin), ylim=(len(scores) - 0.4, -0.6), xlabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True))
    axes.grid(visible=True)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def wilson_interval(share: Floats, images: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """95 % interval of a share of at least one image (Wilson, 1927)."""
    centre = (share + _Z**2 / (2 * images)) / (1 + _Z**2 / images)
    half = _Z * np.sqrt(share * (1 - share) / images + _Z**2 / (4 * images**2)) / (1 + _Z**2 / images)
    return np.clip(centre - half, 0, 1), np.clip(centre + half, 0, 1)


@of_each_set
def draw_reliability(request: DrawRequest, one: EvaluatedSet) -> Drawn | None:
    """Draw the diagram of each held-out set whose evaluation measured calibration."""
    calibration = one.evaluation.calibration
    if calibration is None or not calibration.images.sum():
        return None
    total, error = int(calibration.images.sum()), calibration_error(calibration)
    filled = calibration.images > 0
    confidence = float(calibration.images[filled] @ calibration.confidence[filled] / total)
    accuracy = float(calibration.images[filled] @ calibration.accuracy[filled] / total)
    tendency = "more sure than it is right" if confidence > accuracy else "less sure than it is right"
    picture = one.picture(
        "reliability",
        f"Reliability: calibration error {percent(error)}",
        caption="Share of right predictions over the probability that the model gave them, in bins of equal width; "
        "bars: 95 % intervals. On the dashed line the model is as sure as it is right; below it, too sure. Open "
        f"circles: bins of fewer than {_FEW} images. Below: images in each bin.",
        alt=f"Reliability diagram of {counted(total, 'image')}: calibration error {percent(error)}; mean "
        f"confidence {percent(confidence)}, accuracy {percent(accuracy)}, so the model is {tendency}.",
    )
    return picture, _diagram(calibration, confidence=confidence, accuracy=accuracy, error=error)


def _diagram(calibration: Calibration, *, confidence: float, accuracy: float, error: float) -> Figure:
    filled = calibration.images > 0
    images = calibration.images[filled]
    sure, right = 100 * calibration.confidence[filled], 100 * calibration.accuracy[filled]
    low, high = (100 * bound for bound in wilson_interval(calibration.accuracy[filled], images))
    figure, [[top], [bottom]] = new_figure(width=6.2, height=6.4, rows=2, sharex=True, height_ratios=(3, 1))
    top.grid(visible=True)
    top.plot([0, 100], [0, 100], color=MUTED, linestyle=(0, (4, 3)), linewidth=1.2)
    top.text(2, 97, "not sure enough", va="top", color=MUTED)
    top.text(98, 3, "too sure", ha="right", color=MUTED)
    top.fill_between(sure, sure, right, color=ACCENT, alpha=0.12, linewidth=0)
    top.vlines(sure, low, high, color=ACCENT, linewidth=1.3, alpha=0.7)
    top.plot(sure, right, color=ACCENT)
    faces = [ACCENT if number >= _FEW else PAPER for number in images]
    top.scatter(sure, right, c=faces, edgecolors=ACCENT, s=36, clip_on=False, zorder=3)
    top.set(xlim=(0, 100), ylim=(0, 100), ylabel="right predictions, %")
    top.set_title(f"Calibration error {percent(error)}")
    edges = 100 * calibration.edges
    colours = [ACCENT if number >= _FEW else SERIES[6] for number in calibration.images]
    bottom.bar((edges[:-1] + edges[1:]) / 2, calibration.images, width=0.86 * np.diff(edges), color=colours)
    for value, name, colour, style in ((confidence, "mean confidence", INK, "-"), (accuracy, "accuracy", BAD, "--")):
        bottom.axvline(100 * value, color=colour, linewidth=1.4, linestyle=style, label=f"{name} {percent(value)}")
    bottom.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.1)
    bottom.grid(visible=True, axis="y")
    bottom.set(xlabel="confidence: probability of the predicted class, %", ylabel="images")
    plain_numbers(bottom.yaxis)
    figure.align_ylabels()
    return figure

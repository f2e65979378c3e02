"""How well each class is known: a table of all, worst first, and a figure of how the scores are spread.

The score is the share of a class's images that were told rightly; with several labels an image, average precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from data_shards.text import counted, one_line
from pipeline.pictures.calibration import wilson_interval
from pipeline.pictures.confusion import row_shares
from pipeline.pictures.evaluated import EvaluatedSet, brief, of_each_set, percent
from pipeline.pictures.style import ACCENT, BAD, GRID, MUTED, keep_picture, new_figure, plain
from pipeline.runs.evaluations import Evaluation
from pipeline.runs.pictures import Cell, DrawRequest, Picture, keep_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_DOTS = 40  # classes that have a line each in the figure
_ENDS = 12  # of more: so many of the worst


@dataclass(frozen=True)
class ClassScore:
    """One class."""

    number: int
    images: int  # that have it
    score: float  # NaN without images
    confused_with: int | None = None  # the class that most of its images were taken for instead
    confused_share: float = 0.0  # of its images


def class_scores(evaluation: Evaluation) -> list[ClassScore]:
    """All classes, the worst first, those without images last; at equal scores the one with more images first."""
    per_class, confusion = evaluation.per_class, evaluation.confusion
    scores = per_class.accuracy if per_class.average_precision is None else per_class.average_precision
    scores = np.where(per_class.images > 0, scores, np.nan)
    order = np.lexsort((-per_class.images, scores))  # NaN last
    others, shares = [None] * len(scores), np.zeros(len(scores))
    if confusion is not None and len(confusion) > 1:
        wrong = np.nan_to_num(row_shares(confusion) * ~np.eye(len(confusion), dtype=bool))
        shares = wrong.max(axis=1)
        most = wrong.argmax(axis=1).tolist()
        others = [other if share > 0 else None for other, share in zip(most, shares.tolist(), strict=True)]
    return [
        ClassScore(
            number=number,
            images=int(per_class.images[number]),
            score=float(scores[number]),
            confused_with=others[number],
            confused_share=float(shares[number]),
        )
        for number in order.tolist()
    ]


@of_each_set
def draw_per_class_table(request: DrawRequest, one: EvaluatedSet) -> None:
    """All classes of each held-out set."""
    evaluation = one.evaluation
    scores = class_scores(evaluation)
    columns: dict[str, list[Cell]] = {
        "class": [one_line(evaluation.classes[each.number]) for each in scores],
        "images": [each.images for each in scores],
        f"{_score_name(evaluation)}, %": [_rounded(each.score) for each in scores],
    }
    if evaluation.per_class.average_precision is not None:
        accuracy = evaluation.per_class.accuracy
        columns["right, %"] = [_rounded(float(accuracy[each.number])) for each in scores]
    if evaluation.confusion is not None:
        others = [each.confused_with for each in scores]
        columns["taken for"] = ["" if other is None else one_line(evaluation.classes[other]) for other in others]
        columns["share, %"] = [None if each.confused_with is None else _rounded(each.confused_share) for each in scores]
    confused = "" if evaluation.confusion is None else " Taken for: the class that most of its mistakes name."
    picture = Picture(
        name=one.name("per_class"),
        title=one.title("Classes, worst first"),
        caption=f"{_score_says(evaluation)}{confused} Classes without held-out images stand last.",
        alt=_alt(evaluation, scores),
        group="evaluation",
    )
    keep_table(request.stage_folder, picture, columns=columns, step=request.step)


@of_each_set
def draw_per_class(request: DrawRequest, one: EvaluatedSet) -> None:
    """The spread over the classes of each held-out set that has images of two at least."""
    scores = [each for each in class_scores(one.evaluation) if each.images]
    if len(scores) < 2:
        return
    is_long = len(scores) > _MOST_DOTS
    caption = _score_says(one.evaluation) + " Worst first; on the right: images of the class."
    if one.evaluation.per_class.average_precision is None:
        caption += " Bars: 95 % intervals."
    if is_long:
        caption += f" Above: all {len(scores):,} classes by rank; below: the {_ENDS} worst."
    picture = Picture(
        name=one.name("class_scores"),
        title=one.title(f"{_score_name(one.evaluation).capitalize()} by class"),
        caption=caption,
        alt=_alt(one.evaluation, scores),
        group="evaluation",
    )
    figure = _ranked(one.evaluation, scores) if is_long else _dots(one.evaluation, scores)
    keep_picture(request.stage_folder, picture, figure=figure, step=request.step)


def _score_name(evaluation: Evaluation) -> str:
    return "accuracy" if evaluation.per_class.average_precision is None else "average precision"


def _score_says(evaluation: Evaluation) -> str:
    if evaluation.per_class.average_precision is None:
        return "Accuracy: share of a class's images that are predicted as it, in per cent."
    return "Average precision: area below precision over recall of a class's probabilities, in per cent."


def _rounded(share: float) -> float | None:
    return round(100 * share, 2) if np.isfinite(share) else None


def _alt(evaluation: Evaluation, scores: list[ClassScore]) -> str:
    known = [each for each in scores if each.images]
    if not known:
        return f"{counted(len(scores), 'class')} without a held-out image."
    values = np.array([each.score for each in known])
    worst = ", ".join(f"{brief(evaluation.classes[each.number])} {percent(each.score)}" for each in known[:3])
    best = known[-1]
    return (
        f"{_score_name(evaluation).capitalize()} of {counted(len(known), 'class')}: mean {percent(values.mean())}, "
        f"median {percent(float(np.median(values)))}. Worst: {worst}; best: "
        f"{brief(evaluation.classes[best.number])} {percent(best.score)}."
    )


def _dots(evaluation: Evaluation, scores: list[ClassScore]) -> Figure:
    figure, axes = new_figure(width=6.6, height=1.0 + 0.27 * len(scores))
    _draw_dots(axes[0, 0], evaluation, scores)
    mean = 100 * float(np.mean([each.score for each in scores]))
    axes[0, 0].axvline(mean, color=BAD, linewidth=1.2, linestyle="--")
    place = {"transform": axes[0, 0].get_xaxis_transform(), "va": "bottom", "color": BAD}
    axes[0, 0].text(mean, 1.0, f"mean {percent(mean / 100)}", ha="right" if mean > 50 else "left", **place)
    return figure


def _ranked(evaluation: Evaluation, scores: list[ClassScore]) -> Figure:
    figure, axes = new_figure(width=6.6, height=3.1 + 0.27 * _ENDS, rows=2, height_ratios=(2.0, 0.5 + 0.27 * _ENDS))
    [[top], [bottom]] = axes
    values = 100 * np.array([each.score for each in scores])
    mean = float(values.mean())
    ranks = np.arange(1, len(values) + 1)
    top.fill_between(ranks, values, color=ACCENT, alpha=0.15, linewidth=0)
    top.plot(ranks, values, color=ACCENT)
    top.axhline(mean, color=BAD, linewidth=1.2, linestyle="--")
    place = {"transform": top.get_yaxis_transform(), "va": "bottom", "color": BAD}
    top.text(0.01, mean, f"mean {percent(mean / 100)}", ha="left", **place)
    top.set(xlim=(1, len(values)), ylim=(0, 100), ylabel=f"{_score_name(evaluation)}, %", xlabel="class, worst first")
    top.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    top.grid(visible=True, color=GRID)
    _draw_dots(bottom, evaluation, scores[:_ENDS])
    return figure


def _draw_dots(ax: Axes, evaluation: Evaluation, scores: list[ClassScore]) -> None:
    from matplotlib.ticker import MaxNLocator

    places = list(range(len(scores)))
    values = np.array([each.score for each in scores])
    least = values.min()
    if evaluation.per_class.average_precision is None:
        low, high = wilson_interval(values, np.array([each.images for each in scores]))
        least = low.min()
        ax.hlines(places, 100 * low, 100 * high, color=ACCENT, linewidth=1.4, alpha=0.55)
    ax.plot(100 * values, places, "o", color=ACCENT, markersize=6)
    right = {"transform": ax.get_yaxis_transform(), "ha": "right", "color": MUTED}
    for place, each in zip(places, scores, strict=True):
        ax.text(1.1, place, f"{each.images:,}", va="center_baseline", **right)
    ax.text(1.1, -0.6, "images", va="bottom", **right)
    ax.set_yticks(places, [plain(evaluation.classes[each.number], longest=26) for each in scores])
    start = 10 * (10 * least // 1) if least > 0.3 else 0  # dots need no zero, but one that is near is shown
    margin = 0.02 * (100 - start)
    ax.set(xlim=(start - margin, 100 + margin), ylim=(len(scores) - 0.4, -0.6), xlabel=f"{_score_name(evaluation)}, %")
    ax.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True))
    ax.grid(visible=True, color=GRID)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)

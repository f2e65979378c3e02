"""The paper's figures of several runs: few-shot accuracy over size (its Figure 4), transfer over cost (its Figure 5).

Each comes with its table, which has all numbers, also those that the figure has no room for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import TYPE_CHECKING

import numpy as np

from data_shards.text import counted
from pipeline.pictures.evaluated import percent
from pipeline.pictures.paper.measured_runs import CostPoint, FewShotPoint, cost_points, few_shot_points
from pipeline.pictures.style import DASHES, SERIES, draw_level, new_figure
from pipeline.runs.pictures import Cell, Picture
from pipeline.runs.read import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_PANELS = 4
_MOST_TICKS = 6
_MARKERS = "osD^vPX"  # so that grey prints tell lines apart
_MOST_LABELS = 12  # of points in a panel; the table has all names
_FLOPS = (("exa", 1.0), ("peta", 1e-3), ("tera", 1e-6), ("giga", 1e-9))  # in exaFLOPs
_FAMILIES = {"ViT": ("o", SERIES[0]), "hybrid": ("s", SERIES[1]), "ResNet": ("^", SERIES[2])}  # as in the paper


@dataclass(frozen=True)
class FigureOfRuns:
    """A figure, its words, and its numbers by column."""

    picture: Picture
    figure: Figure
    table: dict[str, list[Cell]]


def few_shot_over_size(runs: Sequence[Run]) -> FigureOfRuns | None:
    """Few-shot accuracy over the size of pre-training; None: no run has measured any.

    Where runs of one model were pre-trained on sets of different sizes, a line is a model over these sizes, each run at
    its end: the paper's Figure 4. Otherwise a line is a run over the images that it had seen.
    """
    points = [point for name, run in _named(runs) for point in few_shot_points(run, name=name)]
    if not points:
        return None
    by_set = _differ_in_data(points)
    shown = [point for point in _at_the_end(points) if point.training_images] if by_set else points
    measures = _most_frequent([point.measure for point in sorted(shown, key=lambda each: each.shots)])
    figure, panels = _panels(
        measures, x="images of the pre-training set" if by_set else "images seen in pre-training", sharey=True
    )
    lines = list(dict.fromkeys(point.model if by_set else point.run for point in shown))
    for panel, measure in zip(panels, measures, strict=False):
        for number, line in enumerate(lines):
            own = [each for each in shown if each.measure == measure and line == (each.model if by_set else each.run)]
            places = sorted(((each.training_images or 0) if by_set else each.images_seen, each.top1) for each in own)
            if places:
                panel.plot(
                    *zip(*places, strict=True),
                    color=SERIES[number % len(SERIES)],
                    linestyle=DASHES[number % len(DASHES)],
                    marker=_MARKERS[number % len(_MARKERS)],
                    markersize=5,
                    label=line,
                    clip_on=False,
                )
        _ticks(panel, [size for line in panel.get_lines() for size in np.asarray(line.get_xdata()).tolist()], room=0.05)
    _legend(figure, panels, entries=len(lines))
    last = _at_the_end(points)
    what = "the size of the pre-training set; a line is a model" if by_set else "the images seen; a line is a run"
    best = max(last, key=lambda each: each.top1)
    picture = Picture(
        name="few_shot_over_size",
        title="Few-shot accuracy over pre-training",
        caption="Top-1 of a linear classifier fitted to a few images of each class on the frozen features (closed-form "
        f"least squares), over {what} (ViT paper, Figure 4's form). The table has all points.",
        alt=f"{counted(len(lines), 'line')}. At its end the best, {best.run}, has {percent(best.top1)} "
        f"({best.measure}) after {best.images_seen:,} images.",
        group="paper",
    )
    heads = {
        "run": "run",
        "model": "model",
        "data_set": "data set",
        "shots": "shots",
        "training_images": "pre-training set, images",
        "images_seen": "images seen",
        "top1": "top-1, %",
    }
    return FigureOfRuns(picture, figure, _table(points, heads))


def transfer_over_cost(runs: Sequence[Run]) -> FigureOfRuns | None:
    """Accuracy after transfer over the FLOPs of pre-training; None: no run has both.

    A run without pre-training is a dashed line; one that was pre-trained elsewhere is in the table alone.
    """
    points = [point for name, run in _named(runs) for point in cost_points(run, name=name)]
    priced = [(point.exaflops, point) for point in points if point.exaflops]
    if not priced:
        return None
    measures = _most_frequent([point.measure for _, point in priced])
    prefix, unit = next((each for each in _FLOPS if max(cost for cost, _ in priced) >= each[1]), _FLOPS[-1])
    figure, panels = _panels(measures, x=f"pre-training cost ({prefix}FLOPs)")
    for panel, measure in zip(panels, measures, strict=False):
        own = [(cost / unit, point) for cost, point in priced if point.measure == measure]
        for family, (marker, colour) in _FAMILIES.items():
            places = [(cost, point.top1) for cost, point in own if point.family == family]
            if places:
                panel.scatter(*zip(*places, strict=True), marker=marker, color=colour, s=42, label=family, zorder=3)
        for cost, point in own if len(own) <= _MOST_LABELS else ():
            panel.annotate(
                point.run, (cost, point.top1), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8
            )
        _ticks(panel, [cost for cost, _ in own], room=0.35)
        panel.margins(y=0.2)
        for each in points:
            if each.measure == measure and each.exaflops == 0:
                draw_level(panel, each.top1, f"{each.run}: nothing pre-trained", fontsize=8)
    _legend(figure, panels, entries=len(_FAMILIES))
    cost, best = max(priced, key=lambda each: each[1].top1)
    picture = Picture(
        name="transfer_over_cost",
        title="Transfer over the cost of pre-training",
        caption="Top-1 after transfer over what pre-training cost: forward and backward FLOPs of all images seen, by "
        "formula, on a logarithmic axis (ViT paper, Figure 5's form). Up and to the left is better. The table has all "
        "measures, and hours where they were counted.",
        alt=f"{counted(len({each.run for _, each in priced}), 'pre-trained run')}. The best, {best.run}, has "
        f"{percent(best.top1)} ({best.measure}) for {cost / unit:.3g} {prefix}FLOPs.",
        group="paper",
    )
    heads = {
        "run": "run",
        "model": "model",
        "measure": "measure",
        "images_seen": "images seen",
        "exaflops": "exaFLOPs",
        "hours": "hours",
        "top1": "top-1, %",
    }
    return FigureOfRuns(picture, figure, _table(points, heads))


def _table(points: Sequence[FewShotPoint | CostPoint], heads: Mapping[str, str]) -> dict[str, list[Cell]]:
    """A column for each attribute, under its heading."""
    columns = {head: [getattr(each, name) for each in points] for name, head in heads.items()}
    return {**columns, heads["top1"]: [round(100 * each.top1, 2) for each in points]}


def _named(runs: Sequence[Run]) -> list[tuple[str, Run]]:
    """Each run with its name, or with its path where two have one name."""
    names = [run.name for run in runs]
    return [(str(run.folder.path) if names.count(run.name) > 1 else run.name, run) for run in runs]


def _at_the_end(points: Sequence[FewShotPoint]) -> list[FewShotPoint]:
    """The last of each run and measure."""
    ordered = sorted(points, key=lambda each: each.images_seen)
    return list({(each.run, each.measure): each for each in ordered}.values())


def _differ_in_data(points: Sequence[FewShotPoint]) -> bool:
    """True if one model was pre-trained on sets of different sizes."""
    sizes: dict[str, set[int]] = {}
    for point in points:
        if point.training_images:
            sizes.setdefault(point.model, set()).add(point.training_images)
    return any(len(each) > 1 for each in sizes.values())


def _most_frequent(measures: Sequence[str]) -> list[str]:
    """The few with most points, in the order they came in."""
    kept = sorted(dict.fromkeys(measures), key=lambda each: -measures.count(each))[:_MOST_PANELS]
    return [measure for measure in dict.fromkeys(measures) if measure in kept]


def _panels(measures: Sequence[str], *, x: str, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """One for each measure, two or three in a row, with a logarithmic x and shares as y."""
    columns = {1: 1, 3: 3}.get(len(measures), 2)
    rows = -(-len(measures) // columns)
    figure, axes = new_figure(
        width={1: 5.2, 2: 7.2, 3: 9.0}[columns], height=3.1 * rows + 0.4, rows=rows, columns=columns, sharey=sharey
    )
    panels = list(axes.flat)
    for number, (panel, measure) in enumerate(zip(panels, measures, strict=False)):
        panel.set_xscale("log")
        panel.set_title(measure)
        panel.set(xlabel=x, ylabel="" if sharey and number % columns else "top-1")
        panel.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
        panel.grid(True)
    for panel in panels[len(measures) :]:
        panel.set_axis_off()
    return figure, panels


def _ticks(panel: Axes, values: Sequence[float], *, room: float) -> None:
    """Set a logarithmic x axis with ticks at 1, 2 and 5 times powers of ten; `room`: margin as a share of the span."""
    low, high = log10(min(values)), log10(max(values))
    margin = max(0.15, room * (high - low), 0.4 - (high - low) / 2)  # 0.8 decades at least: two ticks
    low, high = low - margin, high + margin
    panel.set_xlim(10**low, 10**high)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**power for power in range(floor(low), ceil(high) + 1) for factor in factors]
        ticks = [tick for tick in ticks if low <= log10(tick) <= high]
        if len(ticks) <= _MOST_TICKS:
            break
    else:
        ticks = ticks[:: ceil(len(ticks) / _MOST_TICKS)]
    panel.set_xticks(ticks, [_short(tick) for tick in ticks])
    panel.set_xticks([], minor=True)


def _short(number: float) -> str:
    """300000 as 300k."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:g}{prefix}"
    return f"{number:.3g}"


def _legend(figure: Figure, panels: Sequence[Axes], *, entries: int) -> None:
    """Below all panels, one for all."""
    known = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        known |= dict(zip(labels, handles, strict=True))
    figure.legend(
        list(known.values()), list(known), loc="outside lower left", ncols=min(3, max(1, entries)), handlelength=3.2
    )

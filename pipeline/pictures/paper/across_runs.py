"""Draw the ViT paper's figures across runs: few-shot accuracy over size (Figure 4), transfer over cost (Figure 5).

Each comes with a table of all numbers, including those left out of the figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, floor, log10
from typing import TYPE_CHECKING

from shardvit.data_shards.text import counted
from shardvit.pipeline.pictures.evaluated import percent
from shardvit.pipeline.pictures.paper.measured_runs import CostPoint, FewShotPoint, cost_points, few_shot_points
from shardvit.pipeline.pictures.style import DASHES, SERIES, Drawn, draw_level, new_figure
from shardvit.pipeline.runs.pictures import Cell, Picture
from shardvit.pipeline.runs.read import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_PANELS = 4
_MOST_TICKS = 6
_MARKERS = "osD^vPX"  # distinguish lines in greyscale
_MOST_LABELS = 12  # of points in a panel; the table names all
_FLOPS = (("exa", 1.0), ("peta", 1e-3), ("tera", 1e-6), ("giga", 1e-9))  # in exaFLOPs
_FAMILIES = {"ViT": ("o", SERIES[0]), "hybrid": ("s", SERIES[1]), "ResNet": ("^", SERIES[2])}  # as in the paper
_HEADS = {  # of the tables' columns
    FewShotPoint: ("run", "model", "data set", "shots", "pre-training set, images", "images seen", "top-1, %"),
    CostPoint: ("run", "model", "measure", "images seen", "exaFLOPs", "hours", "top-1, %"),
}
_ATTRIBUTES = {"pre-training set, images": "training_images", "exaFLOPs": "exaflops", "top-1, %": "top1"}


def few_shot_over_size(runs: Mapping[str, Run]) -> Iterator[Drawn]:
    """Draw few-shot accuracy over pre-training size; nothing if no run measured it.

    If runs of one model were pre-trained on sets of different sizes, a line is a model over these sizes, each run at
    its end (the paper's Figure 4). Otherwise a line is a run over images seen.
    """
    points = [point for name, run in runs.items() for point in few_shot_points(run, name=name)]
    if not points:
        return
    by_end = {(each.run, each.measure): each for each in sorted(points, key=lambda each: each.images_seen)}
    last = list(by_end.values())
    sizes = {(each.model, each.training_images) for each in points if each.training_images}
    by_set = len(sizes) > len({model for model, _ in sizes})
    shown = [each for each in last if each.training_images] if by_set else points
    lines: dict[str, list[tuple[str, float, float]]] = {}  # (measure, x, top-1) of each
    for each in shown:
        line, x = (each.model, each.training_images or 0) if by_set else (each.run, each.images_seen)
        lines.setdefault(line, []).append((each.measure, x, each.top1))
    measures = _most_frequent([each.measure for each in sorted(shown, key=lambda each: each.shots)])
    label = "images of the pre-training set" if by_set else "images seen in pre-training"
    figure, panels = _panels(measures, x=label, sharey=True)
    for panel, measure in zip(panels, measures, strict=False):
        for number, (name, places) in enumerate(lines.items()):
            own = sorted((x, top1) for of, x, top1 in places if of == measure)
            if own:
                style = {"color": SERIES[number % len(SERIES)], "linestyle": DASHES[number % len(DASHES)]}
                marker = {"marker": _MARKERS[number % len(_MARKERS)], "markersize": 5, "clip_on": False}
                panel.plot(*zip(*own, strict=True), label=name, **style, **marker)
        _ticks(panel, [x for places in lines.values() for of, x, _ in places if of == measure], room=0.05)
    _legend(figure, panels, entries=len(lines))
    over = "the size of the pre-training set; a line is a model" if by_set else "the images seen; a line is a run"
    best = max(last, key=lambda each: each.top1)
    picture = Picture(
        name="few_shot_over_size",
        title="Few-shot accuracy over pre-training",
        caption="Top-1 of a linear classifier fitted to a few images of each class on the frozen features (closed-form "
        f"least squares), over {over} (ViT paper, Figure 4's form). The table has all points.",
        alt=f"{counted(len(lines), 'line')}. At its end the best, {best.run}, has {percent(best.top1)} "
        f"({best.measure}) after {best.images_seen:,} images.",
        group="paper",
    )
    yield picture, figure
    yield _table(picture, points)


def transfer_over_cost(runs: Mapping[str, Run]) -> Iterator[Drawn]:
    """Draw transfer accuracy over pre-training FLOPs; nothing if no run has both. A run without pre-training is a
    dashed line; one pre-trained elsewhere is only in the table."""
    points = [point for name, run in runs.items() for point in cost_points(run, name=name)]
    priced = [(point.exaflops, point) for point in points if point.exaflops]
    if not priced:
        return
    measures = _most_frequent([point.measure for _, point in priced])
    prefix, unit = next((each for each in _FLOPS if max(cost for cost, _ in priced) >= each[1]), _FLOPS[-1])
    figure, panels = _panels(measures, x=f"pre-training cost ({prefix}FLOPs)")
    for panel, measure in zip(panels, measures, strict=False):
        own = [(cost / unit, point) for cost, point in priced if point.measure == measure]
        for family, (marker, colour) in _FAMILIES.items():
            places = [(cost, point.top1) for cost, point in own if point.family == family]
            if places:
                panel.scatter(*zip(*places, strict=True), marker=marker, color=colour, s=42, label=family, zorder=3)
        if len(own) <= _MOST_LABELS:
            above = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "fontsize": 8}
            for cost, point in own:
                panel.annotate(point.run, (cost, point.top1), **above)
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
    yield picture, figure
    yield _table(picture, points)


def _table(picture: Picture, points: Sequence[FewShotPoint] | Sequence[CostPoint]) -> Drawn:
    names = {head: _ATTRIBUTES.get(head, head.replace(" ", "_")) for head in _HEADS[type(points[0])]}
    columns: dict[str, list[Cell]] = {head: [getattr(each, name) for each in points] for head, name in names.items()}
    columns["top-1, %"] = [round(100 * each.top1, 2) for each in points]
    words = replace(picture, name=f"{picture.name}_numbers", title=f"{picture.title}: the numbers", caption="")
    return words, columns


def _most_frequent(measures: Sequence[str]) -> list[str]:
    """Keep the measures with the most points, in their original order."""
    kept = sorted(dict.fromkeys(measures), key=lambda each: -measures.count(each))[:_MOST_PANELS]
    return [measure for measure in dict.fromkeys(measures) if measure in kept]


def _panels(measures: Sequence[str], *, x: str, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """Make a panel for each measure, two or three in a row, with logarithmic x and shares as y."""
    columns = {1: 1, 3: 3}.get(len(measures), 2)
    rows, width = -(-len(measures) // columns), {1: 5.2, 2: 7.2, 3: 9.0}[columns]
    figure, axes = new_figure(width=width, height=3.1 * rows + 0.4, rows=rows, columns=columns, sharey=sharey)
    panels = list(axes.flat)
    for number, (panel, measure) in enumerate(zip(panels, measures, strict=False)):
        panel.set(xscale="log", title=measure, xlabel=x, ylabel="" if sharey and number % columns else "top-1")
        panel.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
        panel.grid(True)
    for panel in panels[len(measures) :]:
        panel.set_axis_off()
    return figure, panels


def _ticks(panel: Axes, values: Sequence[float], *, room: float) -> None:
    """Set a logarithmic x axis with ticks at 1, 2 and 5 times powers of ten; `room`: margin as a share of the span."""
    low, high = log10(min(values)), log10(max(values))
    margin = max(0.15, room * (high - low), 0.4 - (high - low) / 2)  # at least 0.8 decades: two ticks
    low, high = low - margin, high + margin
    panel.set_xlim(10**low, 10**high)
    ticks: list[float] = []
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**power for power in range(floor(low), ceil(high) + 1) for factor in factors]
        ticks = [tick for tick in ticks if low <= log10(tick) <= high]
        if len(ticks) <= _MOST_TICKS:
            break
    ticks = ticks[:: ceil(len(ticks) / _MOST_TICKS)]
    panel.set_xticks(ticks, [_short(tick) for tick in ticks])
    panel.set_xticks([], minor=True)


def _short(number: float) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:g}{prefix}"
    return f"{number:.3g}"


def _legend(figure: Figure, panels: Sequence[Axes], *, entries: int) -> None:
    known = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        known |= dict(zip(labels, handles, strict=True))
    columns = min(3, max(1, entries))
    figure.legend(list(known.values()), list(known), loc="outside lower left", ncols=columns, handlelength=3.2)

"""The charts of one stage, of one run or of several over one another: drawn, and as data for the page's script.

Data is thinned to what the page has room for: some hundred columns a curve, in differences between neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from launch.pages.blocks import ChartBlock, DrawnChart
from launch.pages.curves import (
    ChartKind,
    Curve,
    chart_kinds,
    is_share,
    read_curve,
    scale_of,
    thinned,
    training_seconds,
)
from launch.pages.drawing import draw_curves, show_y
from pipeline.recipe.vocabulary import METRICS
from pipeline.runs.events import Event, EventKind
from pipeline.runs.history import StageHistory

DATA_BYTES = 1_000_000  # of all curves of a page, once
_BYTES_PER_POINT = 26
_DRAWN_COLUMNS = 240
_LEAST_COLUMNS, _MOST_COLUMNS = 30, 900
_SCRIPT_DIGITS = 5
_MARKED: tuple[EventKind, ...] = ("start", "rollback", "spike", "skipped", "failed", "stopped")
_MOST_MARKS = 40
COLOURS = 7  # of the page's palette


def stage_charts(
    stages: Mapping[str, StageHistory], *, key: str, title: str, runs: Sequence[str], data_bytes: int
) -> tuple[ChartBlock | None, list[str]]:
    """All charts of a stage.

    Args:
        stages: by the name of the run; those without rows are passed over.
        key: for the script, without blanks.
        title: of the block.
        runs: all runs of the page, in the order of their colours.
        data_bytes: what the data of this stage may take, about.

    Returns:
        The block (None: nothing to draw), and the metrics that were left out because they are always zero.
    """
    stages = {run: stage for run, stage in stages.items() if stage.rows}
    names = list(dict.fromkeys(name for stage in stages.values() for name in stage.metrics))
    drawn: list[tuple[ChartKind, list[Curve]]] = []
    zero: list[str] = []
    for kind in chart_kinds(names):
        curves = [
            curve
            for run, stage in stages.items()
            for number, (metric, label) in enumerate(kind.metrics)
            if (curve := _curve(stage, metric, label, number=number, run=run, runs=runs)) is not None
        ]
        if not curves:
            continue
        if is_idle(kind, curves):
            zero.append(kind.title)
        else:
            drawn.append((kind, curves))
    if not drawn:
        return None, zero
    marks = _marks(stages, runs=runs)
    count = sum(len(curves) for _, curves in drawn)
    columns = max(_LEAST_COLUMNS, min(_MOST_COLUMNS, data_bytes // (2 * _BYTES_PER_POINT * count)))
    charts: list[DrawnChart] = []
    data: list[dict[str, Any]] = []
    for number, (kind, curves) in enumerate(drawn):
        scale, share, alt = scale_of(kind, curves), is_share(kind.unit), _alt(kind, curves)
        curves = [thinned(curve, columns=max(columns, _DRAWN_COLUMNS)) for curve in curves]
        svg = draw_curves(
            [thinned(curve, columns=min(columns, _DRAWN_COLUMNS)) for curve in curves],
            scale=scale,
            is_share=share,
            marks=[(mark["i"], mark["text"]) for mark in marks],
            alt=alt,
        )
        charts.append(
            DrawnChart(
                f"{number}",
                kind.title,
                _unit(kind, scale),
                _meaning(kind),
                svg,
                legend=_legend(curves) if len(runs) == 1 else (),
                rank=kind.rank,
            )
        )
        data.append(
            {
                "key": f"{number}",
                "percent": share,
                "log": scale == "log",
                "series": [_for_script(thinned(curve, columns=columns)) for curve in curves],
            }
        )
    legend = tuple((f"s{runs.index(run) % COLOURS}", run) for run in stages) if len(runs) > 1 else ()
    return ChartBlock(title, tuple(charts), {"key": key, "marks": marks, "charts": data}, legend), zero


def _curve(stage: StageHistory, metric: str, label: str, *, number: int, run: str, runs: Sequence[str]) -> Curve | None:
    has_dots = metric.startswith("val")
    colour = number if len(runs) == 1 else runs.index(run)
    style = f"s{colour % COLOURS}"
    if len(runs) > 1:
        label = f"{run}, {label}" if label else run
        if metric.startswith("train/"):
            style += " thin"
    elif number == 0 or len(runs) == 1:
        style += " whole" if number == 0 else ""
    return read_curve(stage, metric, label=label or _name(metric), style=style, has_dots=has_dots)


def _name(metric: str) -> str:
    return metric.rpartition("/")[2].replace("_", " ")


def is_idle(kind: ChartKind, curves: Sequence[Curve]) -> bool:
    """Whether these are counts or shares of trouble that never came."""
    if any(metric.startswith(("train/", "val")) for metric, _ in kind.metrics):
        return False
    return all(not np.nan_to_num(curve.values).any() for curve in curves)


def _marks(stages: Mapping[str, StageHistory], *, runs: Sequence[str]) -> list[dict[str, Any]]:
    marks: list[dict[str, Any]] = []
    for run, stage in stages.items():
        events = marked_events(stage)[:_MOST_MARKS]
        times = training_seconds(stage, np.array([event.time for event in events]))
        for event, seconds in zip(events, times.tolist(), strict=True):
            said = f"{event.kind}, step {event.step:,}: {event.text}"[:200]
            marks.append(
                {
                    "i": event.images_seen,
                    "s": event.step,
                    "t": round(seconds, 1),
                    "text": f"{run}: {said}" if len(runs) > 1 else said,
                }
            )
    return marks[:_MOST_MARKS]


def marked_events(stage: StageHistory) -> list[Event]:
    """Restarts and trouble: what explains a curve; the first start is none."""
    found = [event for event in stage.events if event.kind in _MARKED]
    first = next((event for event in found if event.kind == "start"), None)
    return [event for event in found if event is not first]


def _legend(curves: Sequence[Curve]) -> tuple[tuple[str, str], ...]:
    if len(curves) < 2:
        return ()
    return tuple((f"{curve.style}{' dots' if curve.has_dots else ''}", curve.label) for curve in curves)


def _unit(kind: ChartKind, scale: str) -> str:
    unit = "" if is_share(kind.unit) else kind.unit
    return f"{unit}, logarithmic" if scale == "log" and unit else "logarithmic" if scale == "log" else unit


def _meaning(kind: ChartKind) -> str:
    known = METRICS.get(kind.metrics[0][0])
    return "" if known is None else known.meaning


def _alt(kind: ChartKind, curves: Sequence[Curve]) -> str:
    share = is_share(kind.unit)
    parts: list[str] = []
    for curve in curves[:8]:
        finite = curve.values[np.isfinite(curve.values)]
        first, last = show_y(float(finite[0]), share), show_y(float(finite[-1]), share)
        low, high = show_y(float(finite.min()), share), show_y(float(finite.max()), share)
        parts.append(f"{curve.label} from {first} to {last}, between {low} and {high}")
    return f"{kind.title} over images seen: {'; '.join(parts)}"


def _for_script(curve: Curve) -> dict[str, Any]:
    """A curve in differences between neighbours, which are short; its time in tenths of a second."""
    values = [None if np.isnan(value) else float(f"{value:.{_SCRIPT_DIGITS}g}") for value in curve.values.tolist()]
    return {
        "label": curve.label,
        "cls": curve.style,
        "dots": curve.has_dots,
        "s": _differences(curve.steps),
        "i": _differences(curve.images),
        "t": _differences(np.rint(curve.seconds * 10).astype(np.int64)),
        "v": values,
    }


def _differences(values: np.ndarray) -> list[int]:
    return np.diff(values, prepend=0).tolist()

"""From a stage's rows to what is drawn: which metrics share a chart, over which x, and how few points are enough.

A curve keeps of each column of pixels its lowest and highest point, its first and last ones, and the gaps (values that
are not finite), so that no spike is lost; 100,000 points take a few milliseconds. Time leaves out the pauses between
attempts, which may be days.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import TYPE_CHECKING, Literal

import numpy as np

from pipeline.recipe.vocabulary import METRICS
from pipeline.runs.history import StageHistory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Counts = NDArray[np.int64]

Scale = Literal["linear", "log"]

_LOG_RATIO = 30.0  # between the highest and lowest value of a metric that may have a logarithmic axis
_MOST_VALUE = 1e30  # beyond it a value is no number: axes have to be computed with it
LATEST = 1e11  # unix seconds: a damaged row may say anything
_MOST_CHARTS = 40  # a run folder may hold thousands of names
_OF_EACH_SET = ("top1", "accuracy", "loss")
_LONGEST_TITLE = 60
_FEW_SHOT = "val/fewshot_"
_NOT_DRAWN = re.compile(r"train/epoch$|val[^/]*/images$|model/")  # the x axis once more; constants


@dataclass(frozen=True)
class ChartKind:
    """Metrics that share a chart."""

    title: str
    metrics: tuple[tuple[str, str], ...]  # (name, what its line is called)
    unit: str = ""
    scale: Scale = "linear"  # log: if its values span enough
    rank: Literal["first", "more"] = "first"  # more: looked at when something is wrong


@dataclass(frozen=True)
class Curve:
    """One metric of one run's stage; arrays of one length, steps ascending."""

    label: str
    style: str  # classes of the page's style sheet
    has_dots: bool  # few points, each of which counts
    steps: Counts
    images: Counts
    seconds: Floats  # of training, pauses between attempts left out
    values: Floats

    def at(self, indexes: NDArray[np.int64]) -> Curve:
        """The curve with these points alone."""
        arrays = ("steps", "images", "seconds", "values")
        return replace(self, **{name: getattr(self, name)[indexes] for name in arrays})


_KINDS = (
    ChartKind(
        "Loss",
        (
            ("train/loss", "training"),
            ("val/loss", "held out"),
            ("val/ema_loss", "held out, moving average"),
        ),
        scale="log",
    ),
    ChartKind(
        "Top-1",
        (
            ("train/top1", "training"),
            ("val/top1", "held out"),
            ("val/ema_top1", "held out, moving average"),
            ("val/commonest_class_share", "commonest class"),
        ),
    ),
    ChartKind(
        "Accuracy",
        (
            ("train/accuracy", "training"),
            ("val/accuracy", "held out"),
            ("val/ema_accuracy", "held out, moving average"),
        ),
    ),
    ChartKind("Learning rate", (("opt/lr", ""),)),
    ChartKind("Gradient norm", (("opt/grad_norm", ""),), scale="log"),
    ChartKind("Speed", (("perf/images_per_s", ""),)),
    ChartKind("Waiting for data", (("perf/data_wait_frac", ""),)),
    ChartKind(
        "Time of a step",
        (("perf/step_seconds_p50", "median"), ("perf/step_seconds_p95", "95 %"), ("perf/step_seconds_max", "longest")),
        scale="log",
        rank="more",
    ),
)
_TITLES = {
    "opt/parameter_norm": "Norm of the weights",
    "opt/update_ratio": "Update to weights",
    "perf/model_tflops_per_s": "Computed by a process",
    "perf/mfu": "FLOPs utilisation",
    "perf/gpu_memory_peak_gib": "GPU memory, peak",
    "perf/host_memory_peak_gib": "Host memory, peak",
    "perf/gpu_hours": "GPU hours",
    "perf/process_hours": "Process hours",
    "perf/save_stall_frac": "Waiting for saves",
    "perf/slowest_rank_ratio": "Slowest rank to median",
}


def chart_kinds(names: Sequence[str]) -> list[ChartKind]:
    """The charts for metrics of these names: the well-known ones first, then one for each other that is known, those of
    several held-out sets together, then unknown ones."""
    left = dict.fromkeys(name for name in names if not _NOT_DRAWN.match(name))
    kinds: list[ChartKind] = []
    for kind in _KINDS:
        present = tuple((name, label) for name, label in kind.metrics if name in left)
        for name, _ in present:
            del left[name]
        if present:
            kinds.append(replace(kind, metrics=present, unit=unit_of(present[0][0])))
    others: dict[str, list[str]] = {}
    for name in left:
        group, _, last = name.partition("/")
        if last == "commonest_class_share":  # of other sets: a constant
            continue
        key = f"val_/{last}" if group.startswith("val_") else _FEW_SHOT if name.startswith(_FEW_SHOT) else name
        others.setdefault(key, []).append(name)
    for key, members in sorted(others.items(), key=lambda each: (_order(each[0]), each[0])):
        if key.startswith("val_/"):
            sets = [name.partition("/")[0].removeprefix("val_") for name in members]
            title = f"{metric_words(key[5:]).capitalize()} on {', '.join(sets)}"
            title, rank = shorten(title, _LONGEST_TITLE), "first" if key[5:] in _OF_EACH_SET else "more"
            kinds.append(ChartKind(title, tuple(zip(members, sets, strict=True)), unit_of(members[0]), rank=rank))
        elif key == _FEW_SHOT:
            lines = tuple((name, name.removeprefix(_FEW_SHOT).replace("_", " ")) for name in members)
            kinds.append(ChartKind("Few-shot top-1", lines, "share"))
        else:
            kinds.append(ChartKind(_title(key), ((key, ""),), unit_of(key), rank="more"))
    return kinds[:_MOST_CHARTS]


def read_curve(stage: StageHistory, metric: str, *, label: str, style: str, has_dots: bool) -> Curve | None:
    """A metric of a stage; None: it has no value that can be drawn."""
    steps, images, times, values = stage.columns(metric)
    values[~(np.abs(values) < _MOST_VALUE)] = np.nan
    if np.isnan(values).all():
        return None
    order = np.argsort(steps, kind="stable")  # as written, but for a damaged file
    curve = Curve(label, style, has_dots, steps, images, training_seconds(stage, times), values)
    return curve if (np.diff(order) == 1).all() else curve.at(order)


def training_seconds(stage: StageHistory, times: Floats) -> Floats:
    """Seconds of training at these unix times: since the stage began, without the pauses before it was resumed. Steps
    that were done twice count twice. Never descending."""
    starts = np.array([event.time for event in stage.events if event.kind == "start"])
    ends = np.concatenate([stage.times, [event.time for event in stage.events]])
    ends = np.sort(ends[(ends > 0) & (ends < LATEST)])
    times = np.where((times > 0) & (times < LATEST), times, 0.0)
    if not len(ends):
        return np.zeros_like(times)
    begun = float(ends[0])
    paused = np.zeros_like(times)
    for start in np.sort(starts[(starts > 0) & (starts < LATEST)]):
        before = ends[ends < start]
        if len(before):
            paused += np.where(times >= start, start - before[-1], 0.0)
    return np.maximum.accumulate(np.maximum(0.0, times - begun - paused)) if len(times) else times


def thinned(curve: Curve, *, columns: int) -> Curve:
    """Of each of so many columns of the x axis the lowest and highest point, and where values are missing."""
    count = len(curve.values)
    if count <= 2 * columns:
        return curve
    x = curve.images.astype(np.float64)
    if x[-1] <= x[0]:
        x = np.arange(count, dtype=np.float64)
    column = np.minimum(((x - x[0]) / (x[-1] - x[0]) * columns).astype(np.int64), columns - 1)
    column = np.maximum.accumulate(column)
    first_of = np.flatnonzero(np.diff(column, prepend=-1))
    missing = np.isnan(curve.values)
    by_value = np.lexsort((np.where(missing, np.inf, curve.values), column))
    lowest = by_value[first_of]
    by_value = np.lexsort((np.where(missing, -np.inf, curve.values), column))
    highest = by_value[np.append(first_of[1:], count) - 1]
    gaps = np.flatnonzero(missing & ~np.roll(missing, 1))
    return curve.at(np.unique(np.concatenate([[0, count - 1], lowest, highest, gaps[:columns]])))


def scale_of(kind: ChartKind, curves: Sequence[Curve]) -> Scale:
    """Logarithmic where the kind allows it and its positive values span enough."""
    values = np.concatenate([curve.values[np.isfinite(curve.values)] for curve in curves])
    return "log" if kind.scale == "log" and values.min() > 0 and values.max() / values.min() > _LOG_RATIO else "linear"


def is_share(unit: str) -> bool:
    """Whether values are shown in per cent."""
    return unit == "share"


def _order(key: str) -> int:
    return 0 if key.startswith(("val_/", _FEW_SHOT)) else 1 if key in METRICS else 2


def unit_of(metric: str) -> str:
    """A metric's unit, of another held-out set or a moving average too; "share": shown in per cent."""
    known = METRICS.get(metric) or METRICS.get(f"val/{metric.rpartition('/')[2].removeprefix('ema_')}")
    return known.unit if known is not None else "share" if re.search(r"_(top\d+|\d+shot)$", metric) else ""


def metric_words(name: str) -> str:
    """A metric's name without its group, in words: "top-1" of "top1"."""
    words = re.sub(r"\btop(\d)", r"top-\1", name.removeprefix("ema_").replace("_", " "))
    return f"{words} of the moving average" if name.startswith("ema_") else words


def _title(metric: str) -> str:
    if metric in _TITLES:
        return _TITLES[metric]
    group, _, name = metric.partition("/")
    words = metric_words(name or group).removesuffix(" frac")
    return words.capitalize() if metric in METRICS or group == "val" else metric[:_LONGEST_TITLE]

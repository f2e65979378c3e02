"""Turn a stage's metrics into charts: group them, choose axes, and thin curves to fit the page.

Thinning keeps the extremes of each pixel column, the ends and gaps (non-finite values), so no spike is lost; it takes
milliseconds for 100,000 points. `templates/page.js` draws the charts; the SVG is for readers without scripts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardvit.data_shards.text import printable
from shardvit.launch.pages.blocks import ChartBlock, DrawnChart, Legend
from shardvit.launch.terminal_curves import scaled
from shardvit.pipeline.recipe.vocabulary import METRICS
from shardvit.pipeline.runs.logs import EventKind
from shardvit.pipeline.runs.read import RunStage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Counts = NDArray[np.int64]

Scale = Literal["linear", "log"]

DATA_BYTES = 1_000_000  # for all curves of a page
_LATEST = 1e11  # unix seconds; damaged rows may hold any value
_BYTES_PER_POINT = 26
_STATIC_COLUMNS, _LEAST_COLUMNS, _MOST_COLUMNS = 120, 30, 900
_SCRIPT_DIGITS = 5
_MARKED: tuple[EventKind, ...] = ("start", "rollback", "spike", "skipped", "failed", "stopped", "image_size")
_MOST_MARKS = 40
_COLOURS = 7  # in the page's palette
_WIDTH, _HEIGHT = 400, 216
_LOG_RATIO = 30.0  # highest / lowest value above which an axis may be logarithmic
_MOST_VALUE = 1e30  # larger values count as missing: axis arithmetic would overflow
_MOST_CHARTS = 40  # a run folder may hold thousands of names
_OF_EACH_SET = ("top1", "accuracy", "loss")
_LONGEST_TITLE = 60
_FEW_SHOT = "val/fewshot_"
_NOT_DRAWN = re.compile(r"train/epoch$|val[^/]*/images$|model/")  # the x axis itself, and constants


@dataclass(frozen=True)
class ChartKind:
    """Metrics that share a chart."""

    title: str
    metrics: tuple[tuple[str, str], ...]  # (name, label of its line)
    unit: str = ""
    scale: Scale = "linear"  # log: only if the values span enough
    rank: Literal["first", "more"] = "first"  # more: collapsed, for troubleshooting

    def show(self, value: float) -> str:
        return f"{100 * value:.4g} %" if self.unit == "share" else short(value)


@dataclass(frozen=True)
class Curve:
    """One metric of a run's stage; arrays of equal length, by ascending step."""

    label: str
    style: str  # CSS classes
    has_dots: bool  # few points: mark each
    steps: Counts
    images: Counts
    seconds: Floats  # training time, without pauses between attempts
    values: Floats  # finite, or NaN

    def at(self, indexes: NDArray[np.int64]) -> Curve:
        arrays = ("steps", "images", "seconds", "values")
        return replace(self, **{name: getattr(self, name)[indexes] for name in arrays})


def _held_out(metric: str) -> tuple[tuple[str, str], ...]:
    sources = (("train/", "training"), ("val/", "held out"), ("val/ema_", "held out, moving average"))
    return tuple((f"{group}{metric}", label) for group, label in sources)


_STEP_TIMES = tuple(
    (f"perf/step_seconds_{name}", label) for name, label in (("p50", "median"), ("p95", "95 %"), ("max", "longest"))
)
_KINDS = (
    ChartKind("Loss", _held_out("loss"), scale="log"),
    ChartKind("Top-1", (*_held_out("top1"), ("val/commonest_class_share", "commonest class"))),
    ChartKind("Accuracy", _held_out("accuracy")),
    ChartKind("Learning rate", (("opt/lr", ""),)),
    ChartKind("Gradient norm", (("opt/grad_norm", ""),), scale="log"),
    ChartKind("Speed", (("perf/images_per_s", ""),)),
    ChartKind("Waiting for data", (("perf/data_wait_frac", ""),)),
    ChartKind("Time of a step", _STEP_TIMES, scale="log", rank="more"),
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


def stage_charts(
    stages: Mapping[str, RunStage], *, key: str, title: str, runs: Sequence[str], data_bytes: int
) -> tuple[ChartBlock | None, list[str]]:
    """Chart a stage of `runs` (None: nothing to draw), and list the titles of all-zero charts. `runs`: all on the page,
    in the order of their colours; `key`: the script's name for it, without spaces; `data_bytes`: approximate limit."""
    stages = {run: stage for run, stage in stages.items() if stage.rows}
    drawn: list[tuple[ChartKind, list[Curve]]] = []
    zero: list[str] = []
    for kind in chart_kinds(list(dict.fromkeys(name for stage in stages.values() for name in stage.latest))):
        styled = (
            _styled(stage, kind, number, run=run, runs=runs)
            for run, stage in stages.items()
            for number in range(len(kind.metrics))
        )
        curves = [curve for curve in styled if curve is not None]
        is_trouble = not any(metric.startswith(("train/", "val")) for metric, _ in kind.metrics)
        if is_trouble and curves and not any(np.nan_to_num(curve.values).any() for curve in curves):
            zero.append(kind.title)
        elif curves:
            drawn.append((kind, curves))
    if not drawn:
        return None, zero
    count = sum(len(curves) for _, curves in drawn)
    columns = max(_LEAST_COLUMNS, min(_MOST_COLUMNS, data_bytes // (2 * _BYTES_PER_POINT * count)))
    charts: list[DrawnChart] = []
    data: list[dict[str, Any]] = []
    for number, (kind, curves) in enumerate(drawn):
        values = np.concatenate([curve.values for curve in curves])
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        is_log = kind.scale == "log" and low > 0 and high / low > _LOG_RATIO
        unit = ", ".join(filter(None, ("" if kind.unit == "share" else kind.unit, "logarithmic" if is_log else "")))
        known = METRICS.get(kind.metrics[0][0])
        legend: Legend = ()
        if len(runs) == 1 and len(curves) > 1:
            legend = tuple((f"{each.style}{' dots' * each.has_dots}", each.label) for each in curves)
        svg = _static_svg(kind, curves, ends=(low, high), is_log=is_log)
        caption = "" if known is None else known.meaning
        charts.append(DrawnChart(f"{number}", kind.title, unit, caption, svg, legend, kind.rank))
        series = [_for_script(thinned(curve, columns=columns)) for curve in curves]
        data.append({"key": f"{number}", "percent": kind.unit == "share", "log": is_log, "series": series})
    legend = tuple((f"s{runs.index(run) % _COLOURS}", run) for run in stages) if len(runs) > 1 else ()
    marks = _marks(stages, is_named=len(runs) > 1)
    return ChartBlock(title, tuple(charts), {"key": key, "marks": marks, "charts": data}, legend), zero


def chart_kinds(names: Sequence[str]) -> list[ChartKind]:
    """Group metrics into charts: the usual, other held-out sets' and few-shot, other known, then unknown ones."""
    left = dict.fromkeys(name for name in names if not _NOT_DRAWN.match(name))
    kinds: list[ChartKind] = []
    for kind in _KINDS:
        present = tuple((name, label) for name, label in kind.metrics if name in left)
        if present:
            kinds.append(replace(kind, metrics=present, unit=unit_of(present[0][0])))
        for name, _ in present:
            del left[name]
    others: dict[tuple[int, str], list[str]] = {}  # by rank and name
    for name in left:
        group, _, metric = name.partition("/")
        if metric == "commonest_class_share":  # another set's: a constant
            continue
        key = (1 if name in METRICS else 2, name)
        if group.startswith("val_"):
            key = (0, f"val_/{metric}")
        elif name.startswith(_FEW_SHOT):
            key = (0, _FEW_SHOT)
        others.setdefault(key, []).append(name)
    for (_, key), members in sorted(others.items()):
        group, _, metric = key.partition("/")
        if group == "val_":
            sets = [name.partition("/")[0].removeprefix("val_") for name in members]
            title = shorten(f"{metric_words(metric).capitalize()} on {', '.join(sets)}", _LONGEST_TITLE)
            rank = "first" if metric in _OF_EACH_SET else "more"
            kinds.append(ChartKind(title, tuple(zip(members, sets, strict=True)), unit_of(members[0]), rank=rank))
        elif key == _FEW_SHOT:
            lines = tuple((name, name.removeprefix(_FEW_SHOT).replace("_", " ")) for name in members)
            kinds.append(ChartKind("Few-shot top-1", lines, "share"))
        else:
            words = metric_words(metric or group).removesuffix(" frac").capitalize()
            title = _TITLES.get(key, words if key in METRICS or group == "val" else key[:_LONGEST_TITLE])
            kinds.append(ChartKind(title, ((key, ""),), unit_of(key), rank="more"))
    return kinds[:_MOST_CHARTS]


def read_curve(
    stage: RunStage, metric: str, *, label: str = "", style: str = "", has_dots: bool = False
) -> Curve | None:
    """Read a metric of a stage; None if it has no drawable value."""
    steps, images, times, values = stage.columns(metric)
    values[~(np.abs(values) < _MOST_VALUE)] = np.nan
    if np.isnan(values).all():
        return None
    order = np.argsort(steps, kind="stable")  # already sorted, unless the file is damaged
    return Curve(label, style, has_dots, steps, images, training_seconds(stage, times), values).at(order)


def plausible(times: Iterable[float]) -> Floats:
    """Sort unix times, dropping values that only a damaged file would hold."""
    found = np.sort(np.fromiter(times, dtype=np.float64))
    return found[(found > 0) & (found < _LATEST)]


def training_seconds(stage: RunStage, times: Floats) -> Floats:
    """Convert unix `times` to seconds of training without pauses, never descending; repeated steps count twice."""
    known = plausible([*stage.times, *(event.time for event in stage.events)])
    times = np.where((times > 0) & (times < _LATEST), times, 0.0)
    if not len(known) or not len(times):
        return np.zeros_like(times)
    paused = np.zeros_like(times)
    for start in plausible(event.time for event in stage.events if event.kind == "start"):
        before = known[known < start]
        if len(before):
            paused += np.where(times >= start, start - before[-1], 0.0)
    return np.maximum.accumulate(np.maximum(0.0, times - known[0] - paused))


def thinned(curve: Curve, *, columns: int) -> Curve:
    """Keep the lowest and highest point of each of `columns` along x, the ends, and gaps."""
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
    lowest = np.lexsort((np.where(missing, np.inf, curve.values), column))[first_of]
    by_value = np.lexsort((np.where(missing, -np.inf, curve.values), column))
    highest = by_value[np.append(first_of[1:], count) - 1]
    gaps = np.flatnonzero(missing & ~np.roll(missing, 1))
    return curve.at(np.unique(np.concatenate([[0, count - 1], lowest, highest, gaps[:columns]])))


def unit_of(metric: str) -> str:
    """Look up a metric's unit, also for other held-out sets and moving averages; "share" is shown in per cent."""
    known = METRICS.get(metric) or METRICS.get(f"val/{metric.rpartition('/')[2].removeprefix('ema_')}")
    return known.unit if known is not None else "share" if re.search(r"_(top\d+|\d+shot)$", metric) else ""


def metric_words(name: str) -> str:
    """Put a metric's name without its group into words: "top-1" for "top1"."""
    words = re.sub(r"\btop(\d)", r"top-\1", name.removeprefix("ema_").replace("_", " "))
    return f"{words} of the moving average" if name.startswith("ema_") else words


def short(value: float, *, digits: int = 4) -> str:
    """Format a number for an axis: 25 k, 1.2 M, 0.05, 1.5e-5."""
    for size, letter in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{letter}"
    if not value or abs(value) >= 1e-3:
        return f"{value:.4g}"
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(power)}"


def text(value: str) -> str:
    """Escape text for SVG or HTML, making control characters visible."""
    return escape(printable(value))


def _styled(stage: RunStage, kind: ChartKind, number: int, *, run: str, runs: Sequence[str]) -> Curve | None:
    metric, label = kind.metrics[number]
    if len(runs) > 1:
        label = f"{run}, {label}" if label else run
        style = f"s{runs.index(run) % _COLOURS}{' thin' * metric.startswith('train/')}"
    else:
        style = f"s{number % _COLOURS}{' whole' * (number == 0)}"
    label = label or metric.rpartition("/")[2].replace("_", " ")
    return read_curve(stage, metric, label=label, style=style, has_dots=metric.startswith("val"))


def _marks(stages: Mapping[str, RunStage], *, is_named: bool) -> list[dict[str, Any]]:
    """List restarts and trouble, which explain a curve; not the first start."""
    marks: list[dict[str, Any]] = []
    for run, stage in stages.items():
        marked = [event for event in stage.events if event.kind in _MARKED]
        first = next((event for event in marked if event.kind == "start"), None)
        events = [event for event in marked if event is not first][:_MOST_MARKS]
        times = training_seconds(stage, np.array([event.time for event in events]))
        for event, seconds in zip(events, times.tolist(), strict=True):
            said = f"{event.kind}, step {event.step:,}: {event.text}"[:200]
            said = f"{run}: {said}" if is_named else said
            marks.append({"i": event.images_seen, "s": event.step, "t": round(seconds, 1), "text": said})
    return marks[:_MOST_MARKS]


def _static_svg(kind: ChartKind, curves: Sequence[Curve], *, ends: tuple[float, float], is_log: bool) -> str:
    """Draw curves between `ends` (lowest and highest value) over images seen."""
    first, last = min(each.images[0] for each in curves), max(each.images[-1] for each in curves)
    parts: list[str] = []
    for curve in (thinned(curve, columns=_STATIC_COLUMNS) for curve in curves):
        ys = scaled(np.log(curve.values), *np.log(ends)) if is_log else scaled(curve.values, *ends)
        xs = scaled(curve.images, first, last)
        places = [f"{4 + 392 * x:.1f} {196 - 176 * y:.1f}" for x, y in zip(xs.tolist(), ys.tolist(), strict=True)]
        path = "".join(
            f"M{place}h.1" if number == 0 or "nan" in places[number - 1] else f"L{place}"  # h: shows a lone point
            for number, place in enumerate(places)
            if "nan" not in place
        )
        parts.append(f'<path class="line {curve.style}" d="{path}"/>')
    for place, anchor, said in (
        ('x="4" y="12"', "start", kind.show(ends[1])),
        ('x="4" y="210"', "start", kind.show(ends[0])),
        ('x="396" y="210"', "end", f"{short(float(last))} images seen"),
    ):
        parts.append(f'<text {place} text-anchor="{anchor}">{said}</text>')
    words: list[str] = []
    for curve in curves[:8]:
        known = curve.values[~np.isnan(curve.values)].tolist()
        said = map(kind.show, (known[0], known[-1], min(known), max(known)))
        words.append("{} from {} to {}, between {} and {}".format(curve.label, *said))
    alt = text(f"{kind.title} over images seen: {'; '.join(words)}")
    return f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{alt}">{"".join(parts)}</svg>'


def _for_script(curve: Curve) -> dict[str, Any]:
    """Encode as differences between neighbours, short in JSON; times in tenths of a second."""
    columns = {"s": curve.steps, "i": curve.images, "t": np.rint(curve.seconds * 10).astype(np.int64)}
    return {
        **{"label": curve.label, "cls": curve.style, "dots": curve.has_dots},
        **{name: np.diff(values, prepend=0).tolist() for name, values in columns.items()},
        "v": [None if np.isnan(value) else float(f"{value:.{_SCRIPT_DIGITS}g}") for value in curve.values.tolist()],
    }

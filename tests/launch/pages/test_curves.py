"""Curves: thinned without losing an extreme or a gap, over time without pauses; and which chart a metric is in."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardvit.launch.pages.curves import Curve, chart_kinds, read_curve, stage_charts, thinned, training_seconds
from shardvit.launch.pages.timeline import event_table, time_line
from shardvit.pipeline.recipe.vocabulary import METRICS
from shardvit.pipeline.runs.logs import Event, EventKind, MetricRow
from shardvit.pipeline.runs.read import RunStage, read_run
from shardvit.pipeline.runs.run_folder import StageRecord
from tests.launch.report.runs import make_run

VALUES = st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=1, max_size=400)


def curve_of(values: list[float]) -> Curve:
    steps = np.arange(1, len(values) + 1)
    return Curve("x", "s0", False, steps, 64 * steps, steps * 0.5, np.array(values))


def stage_of(rows: list[MetricRow], events: list[Event] | None = None) -> RunStage:
    return RunStage("pretrain", Path("x"), StageRecord(seconds=10.0), tuple(rows), tuple(events or ()))


def row(step: int, time: float, **metrics: float) -> MetricRow:
    return MetricRow(step, 64 * step, time, {name.replace("__", "/"): value for name, value in metrics.items()})


def event(kind: EventKind, time: float, step: int = 0) -> Event:
    return Event(time, step, 64 * step, kind, f"{kind}.")


@given(VALUES, st.integers(2, 40))
def test_thinning_keeps_extremes_ends_and_gaps(values: list[float], columns: int) -> None:
    curve = curve_of(values)
    thin = thinned(curve, columns=columns)
    assert len(thin.values) <= max(2 * columns, 3 * columns + 2)
    assert {*thin.steps.tolist()} <= {*curve.steps.tolist()} and (np.diff(thin.steps) > 0).all()
    assert thin.steps[0] == curve.steps[0] and thin.steps[-1] == curve.steps[-1]
    if not np.isnan(curve.values).all():
        assert np.nanmin(thin.values) == np.nanmin(curve.values)
        assert np.nanmax(thin.values) == np.nanmax(curve.values)
    if not np.isnan(curve.values).all() and np.isnan(curve.values).any():
        assert np.isnan(thin.values).any()


def test_every_column_of_a_long_curve_keeps_its_lowest_and_highest_point() -> None:
    values = np.random.default_rng(0).normal(size=100_000)
    thin = thinned(curve_of(values.tolist()), columns=100)
    column = np.minimum((np.arange(100_000) / 99_999 * 100).astype(int), 99)
    for number in range(100):
        inside = values[column == number]
        assert {inside.min(), inside.max()} <= set(thin.values)


def test_time_leaves_out_the_pause_before_a_restart() -> None:
    rows = [row(1, 1001.0, train__loss=1.0), row(2, 1002.0, train__loss=1.0), row(3, 9003.0, train__loss=1.0)]
    stage = stage_of(rows, [event("start", 1000.0), event("start", 9001.0, 2)])
    curve = read_curve(stage, "train/loss")
    assert curve is not None and curve.seconds.tolist() == [1.0, 2.0, 4.0]
    assert training_seconds(stage, np.array([5000.0])).tolist() == [pytest.approx(4000.0)]


def test_rows_of_a_damaged_file_are_ordered_and_what_is_no_number_is_a_gap() -> None:
    rows = [row(5, 5.0, train__loss=1e300), row(1, 1.0, train__loss=2.0), row(3, float("nan"), train__loss=3.0)]
    curve = read_curve(stage_of(rows), "train/loss")
    assert curve is not None and curve.steps.tolist() == [1, 3, 5]
    assert curve.values[:2].tolist() == [2.0, 3.0] and np.isnan(curve.values[2])
    assert read_curve(stage_of([row(1, 1.0, train__loss=np.inf)]), "train/loss") is None


def test_every_metric_has_one_chart_and_well_known_ones_come_first() -> None:
    names = [*METRICS, "val_real/top1", "val_v2/top1", "val_real/commonest_class_share", "mine"]
    kinds = chart_kinds(names)
    drawn = [name for kind in kinds for name, _ in kind.metrics]
    assert len(drawn) == len(set(drawn)) and {"mine", "train/loss", "opt/lr"} <= set(drawn)
    assert kinds[0].metrics[0][0] == "train/loss" and kinds[-1].metrics == (("mine", ""),)
    assert [name for kind in kinds if "val_real/top1" in dict(kind.metrics) for name, _ in kind.metrics] == [
        "val_real/top1",
        "val_v2/top1",
    ]
    assert any({"val/top1", "val/commonest_class_share"} <= dict(kind.metrics).keys() for kind in kinds)
    assert "val_real/commonest_class_share" not in drawn  # a constant
    assert len(chart_kinds([f"x{number}" for number in range(10_000)])) <= 40


def test_what_is_always_zero_is_named_and_not_drawn() -> None:
    rows = [row(n, float(n), train__loss=1.0, opt__skipped_steps=0.0, opt__grad_norm=float(n)) for n in range(1, 9)]
    block, zero = stage_charts({"x": stage_of(rows)}, key="k", title="t", runs=["x"], data_bytes=10_000)
    assert block is not None and [chart.title for chart in block.charts] == ["Loss", "Gradient norm"]
    assert zero == ["Skipped steps"]
    assert [len(chart["series"][0]["v"]) for chart in block.data["charts"]] == [8, 8]
    assert np.cumsum(block.data["charts"][0]["series"][0]["s"]).tolist() == list(range(1, 9))


@pytest.mark.parametrize("values", [[0.0], [0.5, 0.5], [float("nan"), 1.0, float("nan")], [1e-3, 5.0]])
@pytest.mark.parametrize("count", [1, 2**52, 2**63 - 10])
def test_any_curve_is_drawn_without_the_script(values: list[float], count: int) -> None:
    rows = [MetricRow(count + at, count + at, 5.0, {"train/loss": value}) for at, value in enumerate(values)]
    block, _ = stage_charts({"x": stage_of(rows)}, key="k", title="t", runs=["x"], data_bytes=10_000)
    assert block is not None
    path = block.charts[0].svg.partition(' d="')[2].partition('"')[0]
    assert "nan" not in path and path.startswith("M") and ("L" in path or "h" in path)


def test_the_time_line_has_a_bar_for_each_attempt_and_cuts_long_pauses(tmp_path: Path) -> None:
    history = read_run(make_run(tmp_path, "one"))
    line, table = time_line(history), event_table(history)
    assert line is not None and line.svg.count('class="bar') == 4
    assert table is not None and {str(cells[3]) for cells in table.rows} == {"start", "spike", "stopped", "done"}
    day = 86400.0
    events = [event("start", 1000.0), event("stopped", 1600.0), event("start", day), event("done", day + 600)]
    paused = RunStage("pretrain", Path("x"), StageRecord(), (), tuple(events))
    line = time_line(type(history)(history.name, history.folder, None, (paused,)))
    assert line is not None and "shortened" in line.caption
    widths = [float(part.split('width="')[1].split("%")[0]) for part in line.svg.split("<rect")[1:]]
    assert widths == [pytest.approx(600 / 1320 * 100, abs=0.01)] * 2  # the pause is a tenth of the 1,200 s of work

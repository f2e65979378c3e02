"""Compare runs as plain text of 80 columns: recipes, final metrics with differences to the first run, curves."""

import itertools
from collections.abc import Mapping

from shardvit.data_shards.text import one_line, show_duration, table
from shardvit.launch.pages.curves import chart_kinds, read_curve, short
from shardvit.launch.pages.facts import reached, stage_result
from shardvit.launch.pages.sections import recipe_rows
from shardvit.launch.terminal_curves import draw_curves
from shardvit.pipeline.recipe.vocabulary import ALL_STAGES, METRICS
from shardvit.pipeline.runs.read import Run, RunStage

WIDTH = 80
_HEIGHT = 11  # lines of a curve
_MARKS = "●○▲△■□◆"
_LONGEST_VALUE = 24
_CURVES = (("val/loss", "train/loss"), ("val/top1", "val/accuracy"), ("opt/lr",))  # draw the first available of each


def comparison(named: Mapping[str, Run]) -> str:
    """Format the comparison of runs by name, without a trailing newline."""
    runs = {one_line(name): history for name, history in named.items()}
    marks = dict(zip(runs, itertools.cycle(_MARKS), strict=False))
    heads = [(f"{marks[name]} {name}", str(history.folder.path)) for name, history in runs.items()]
    notes = [f"{name}: {note}" for name, history in runs.items() for note in history.notes]
    parts = ["\n".join([table(heads), *notes]), _recipes(runs)]
    for stage_name in ALL_STAGES:
        if stage_name == "swap_head":
            continue
        stages = {name: stage for name, history in runs.items() if (stage := history.stage(stage_name)) is not None}
        parts += [_results(runs, stages, title=f"stage {stage_name}"), _metrics(stages)]
        parts += [f"{stage_name}: {curve}" for curve in _curves(stages, marks=marks)]
    return "\n\n".join(part for part in parts if part)


def _recipes(runs: Mapping[str, Run]) -> str:
    rows = recipe_rows(list(runs.values()))
    if rows is None:
        return "recipes: one cannot be read"
    if not rows:
        return "recipes: alike, but for names and keys that do not affect the result"
    cut = [[one_line(key), *(_cut(one_line(value)) for value in values)] for key, *values in rows]
    return f"difference of the recipes\n{table([('key', *runs), *cut], heading='ruled')}"


def _cut(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else f"{value[: _LONGEST_VALUE - 1]}…"


def _results(runs: Mapping[str, Run], stages: Mapping[str, RunStage], *, title: str) -> str:
    rows: list[tuple[str, ...]] = [(title, "state", "images seen", "time", "score", "best", "difference")]
    first: float | None = None
    for name, stage in stages.items():
        if stage.rows or stage.record.state != "new":
            result = stage_result(runs[name], stage)
            difference = "" if first is None or result.score is None else f"{result.score - first:+.4f}"
            first = result.score if first is None else first
            scores = ("" if value is None else f"{value:.4f}" for value in (result.score, result.best))
            took = show_duration(stage.record.seconds)
            rows.append((name, stage.record.state, f"{result.images_seen:,}", took, *scores, difference))
    return table(rows, align="llr", heading="ruled") if len(rows) > 1 else ""


def _metrics(stages: Mapping[str, RunStage]) -> str:
    known = {name: reached(stage) for name, stage in stages.items() if stage.rows}
    rows = []
    for metric in METRICS:
        values = [each.get(metric) for each in known.values()]
        if metric == "train/epoch" or sum(value is not None for value in values) < 2 or not any(values):
            continue
        shown = ["" if value is None else f"{value:.5g}" for value in values]
        more = ["" if value is None or values[0] is None else f"{value - values[0]:+.3g}" for value in values]
        rows.append([metric, shown[0], *itertools.chain(*zip(shown[1:], more[1:], strict=True))])
    first, *others = known or [""]
    heading = ["last value", first, *(cell for name in others for cell in (name, "±"))]
    return table([heading, *rows], align="lr", heading="ruled") if rows else ""


def _curves(stages: Mapping[str, RunStage], *, marks: Mapping[str, str]) -> list[str]:
    found: list[str] = []
    for wanted in _CURVES:
        for metric in wanted:
            read = {name: curve for name, stage in stages.items() if (curve := read_curve(stage, metric)) is not None}
            if read:
                lines = [(curve.images, curve.values) for curve in read.values()]
                size, own = {"width": WIDTH, "height": _HEIGHT}, [marks[name] for name in read]
                drawn = draw_curves(lines, marks=own, x_name="images", show_x=short, **size)
                found.append("\n".join([f"{chart_kinds([metric])[0].title.lower()} ({metric})", *drawn]))
                break
    return found

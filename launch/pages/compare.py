"""Compare runs on a terminal: recipe difference, final metrics with differences to the first run, and curves.

Plain text of 80 columns, for pipes and mails.
"""

from __future__ import annotations

from collections.abc import Sequence

from data_shards.text import one_line, show_duration, table
from launch.pages.curves import chart_kinds, read_curve, short
from launch.pages.facts import stage_result
from launch.pages.sections import recipe_rows
from launch.terminal_curves import draw_curves
from pipeline.recipe.vocabulary import ALL_STAGES, METRICS
from pipeline.runs.read import Run, RunStage

WIDTH = 80
_HEIGHT = 11  # of a curve, in lines
_MARKS = "●○▲△■□◆"
_LONGEST_VALUE = 24
_CURVES = (("val/loss", "train/loss"), ("val/top1", "val/accuracy"), ("opt/lr",))  # the first known of each


def comparison(histories: Sequence[Run], names: Sequence[str]) -> str:
    """The whole text, without a final line end."""
    runs = [(one_line(name), history) for name, history in zip(names, histories, strict=True)]
    heads = [
        (f"{_MARKS[at % len(_MARKS)]} {name}", str(history.folder.path)) for at, (name, history) in enumerate(runs)
    ]
    notes = [f"{name}: {note}" for name, history in runs for note in history.notes]
    parts = ["\n".join([table(heads), *notes]), _recipes(runs)]
    for stage_name in ALL_STAGES:
        stages = [(name, history, history.stage(stage_name)) for name, history in runs]
        if stage_name != "swap_head" and any(stage is not None for *_, stage in stages):
            begun = [(name, stage) for name, _, stage in stages if stage is not None and stage.rows]
            parts += [_results(stages, title=f"stage {stage_name}"), _metrics(begun)]
            parts += [f"{stage_name}: {curve}" for curve in _curves([stage for *_, stage in stages])]
    return "\n\n".join(part for part in parts if part)


def _recipes(runs: Sequence[tuple[str, Run]]) -> str:
    rows = recipe_rows([history for _, history in runs])
    if rows is None:
        return "recipes: one cannot be read"
    if not rows:
        return "recipes: alike, but for names and keys that do not affect the result"
    cut = [[one_line(key), *(_cut(one_line(value)) for value in values)] for key, *values in rows]
    heading = ("key", *(name for name, _ in runs))
    return f"difference of the recipes\n{table([heading, *cut], heading='ruled')}"


def _cut(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else f"{value[: _LONGEST_VALUE - 1]}…"


def _results(stages: Sequence[tuple[str, Run, RunStage | None]], *, title: str) -> str:
    rows: list[tuple[str, ...]] = [(title, "state", "images seen", "time", "score", "best", "difference")]
    first: float | None = None
    for name, history, stage in stages:
        if stage is None or (not stage.rows and stage.record.state == "new"):
            continue
        result = stage_result(history, stage)
        difference = "" if first is None or result.score is None else f"{result.score - first:+.4f}"
        first = result.score if first is None else first
        scores = ("" if value is None else f"{value:.4f}" for value in (result.score, result.best))
        rows.append((name, result.state, f"{result.images_seen:,}", show_duration(result.seconds), *scores, difference))
    return table(rows, align="llr", heading="ruled") if len(rows) > 1 else ""


def _metrics(begun: Sequence[tuple[str, RunStage]]) -> str:
    """The last value of each metric that two runs have, with the difference to the first."""
    rows = []
    for metric in METRICS:
        values = [stage.record.results.get(metric, stage.latest.get(metric)) for _, stage in begun]
        if metric == "train/epoch" or sum(value is not None for value in values) < 2 or not any(values):
            continue
        first, cells = values[0], [metric]
        for number, value in enumerate(values):
            cells.append("" if value is None else f"{value:.5g}")
            if number:
                cells.append("" if value is None or first is None else f"{value - first:+.3g}")
        rows.append(cells)
    heading = ["last value", *(cell for name, _ in begun for cell in (name, "±"))]
    return table([heading[:2] + heading[3:], *rows], align="lr", heading="ruled") if rows else ""


def _curves(stages: Sequence[RunStage | None]) -> list[str]:
    """Held-out loss and score, or else those of training, and the learning rate."""
    found: list[str] = []
    for wanted in _CURVES:
        for metric in wanted:
            curves = [
                (_MARKS[number % len(_MARKS)], (curve.images, curve.values))
                for number, stage in enumerate(stages)
                if stage is not None and (curve := read_curve(stage, metric)) is not None
            ]
            if curves:
                marks, lines = zip(*curves, strict=True)
                drawn = draw_curves(lines, width=WIDTH, height=_HEIGHT, marks=marks, x_name="images", show_x=short)
                found.append("\n".join([f"{chart_kinds([metric])[0].title.lower()} ({metric})", *drawn]))
                break
    return found

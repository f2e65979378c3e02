"""Runs beside one another on a terminal: recipe difference, final metrics with differences, and curves in characters.

80 columns, plain text: it goes through pipes and into mails. A run after the first is compared with the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_shards.text import one_line, show_duration, table
from launch.pages.curves import Curve, chart_kinds, read_curve
from launch.pages.drawing import short
from launch.pages.facts import stage_result
from launch.pages.sections import recipe_rows
from pipeline.recipe.vocabulary import ALL_STAGES, METRICS, StageName
from pipeline.runs.history import RunHistory

WIDTH = 80
_HEIGHT = 10  # of a curve, in lines
_LEFT = 9  # of its axis' numbers
_MARKS = "●○▲△■□◆"
_LONGEST_VALUE = 24


def comparison(histories: Sequence[RunHistory], names: Sequence[str]) -> str:
    """All of it, without a line end."""
    names = [one_line(name) for name in names]
    parts = [_runs(histories, names), _recipes(histories, names)]
    for stage in ALL_STAGES:
        if stage != "swap_head" and any(history.stage(stage) for history in histories):
            parts += _stage(histories, names, stage=stage)
    return "\n\n".join(part for part in parts if part)


def _runs(histories: Sequence[RunHistory], names: Sequence[str]) -> str:
    rows = [
        (f"{_MARKS[number % len(_MARKS)]} {name}", str(history.folder.path))
        for number, (name, history) in enumerate(zip(names, histories, strict=True))
    ]
    notes = [f"{name}: {note}" for name, history in zip(names, histories, strict=True) for note in history.notes]
    return "\n".join([table(rows), *notes])


def _recipes(histories: Sequence[RunHistory], names: Sequence[str]) -> str:
    rows = recipe_rows(histories)
    if rows is None:
        return "recipes: one cannot be read"
    if not rows:
        return "recipes: alike, but for names and keys that do not affect the result"
    cut = [[one_line(key), *(_cut(value) for value in values)] for key, *values in rows]
    return f"difference of the recipes\n{table([('key', *names), *cut], heading='ruled')}"


def _cut(value: str) -> str:
    value = one_line(value)
    return value if len(value) <= _LONGEST_VALUE else f"{value[: _LONGEST_VALUE - 1]}…"


def _stage(histories: Sequence[RunHistory], names: Sequence[str], *, stage: StageName) -> list[str]:
    rows = [("stage " + stage, "state", "images seen", "time", "score", "best", "difference")]
    first: float | None = None
    for name, history in zip(names, histories, strict=True):
        of_run = history.stage(stage)
        if of_run is None or (not of_run.rows and of_run.record.state == "new"):
            continue
        result = stage_result(history, of_run)
        difference = "" if first is None or result.score is None else f"{result.score - first:+.4f}"
        first = result.score if first is None else first
        cells = (result.state, f"{result.images_seen:,}", show_duration(result.seconds), _show(result.score))
        rows.append((name, *cells, _show(result.best), difference))
    if len(rows) == 1:
        return []
    parts = [table(rows, align="llr", heading="ruled"), _metrics(histories, names, stage=stage)]
    for title, curves in _curves(histories, names, stage=stage):
        parts.append(f"{stage}: {title}, over images seen\n{plot(curves)}")
    return parts


def _metrics(histories: Sequence[RunHistory], names: Sequence[str], *, stage: StageName) -> str:
    """The last value of each metric that two runs have, with the difference to the first."""
    begun = [
        (name, of_run)
        for name, history in zip(names, histories, strict=True)
        if (of_run := history.stage(stage)) and of_run.rows
    ]
    rows = []
    for metric in METRICS:
        values = [of_run.record.results.get(metric, of_run.last(metric)) for _, of_run in begun]
        if metric == "train/epoch" or sum(value is not None for value in values) < 2 or not any(values):
            continue
        first = values[0]
        cells = [f"{metric}"]
        for number, value in enumerate(values):
            cells.append("" if value is None else f"{value:.5g}")
            if number:
                cells.append("" if value is None or first is None else f"{value - first:+.3g}")
        rows.append(cells)
    if not rows:
        return ""
    heading = ["last value", begun[0][0]]
    for name, _ in begun[1:]:
        heading += [name, "±"]
    return table([heading, *rows], align="lr", heading="ruled")


def _show(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _curves(
    histories: Sequence[RunHistory], names: Sequence[str], *, stage: StageName
) -> list[tuple[str, list[tuple[str, Curve]]]]:
    """Of loss and score the held-out ones, or else those of training, and the learning rate."""
    found: list[tuple[str, list[tuple[str, Curve]]]] = []
    for wanted in (("val/loss", "train/loss"), ("val/top1", "val/accuracy"), ("opt/lr",)):
        for metric in wanted:
            curves = [
                (_MARKS[number % len(_MARKS)], curve)
                for number, (name, history) in enumerate(zip(names, histories, strict=True))
                if (of_run := history.stage(stage))
                and (curve := read_curve(of_run, metric, label=name, style="", has_dots=False)) is not None
            ]
            if curves:
                found.append((chart_kinds([metric])[0].title.lower() + f" ({metric})", curves))
                break
    return found


def plot(curves: Sequence[tuple[str, Curve]], *, width: int = WIDTH, height: int = _HEIGHT) -> str:
    """Curves in characters: (mark, curve); each column has the mean of what falls into it, later runs below earlier."""
    x0 = min(float(curve.images[0]) for _, curve in curves)
    x1 = max(float(curve.images[-1]) for _, curve in curves)
    values = np.concatenate([curve.values[np.isfinite(curve.values)] for _, curve in curves])
    low, high = float(values.min()), float(values.max())
    if high <= low:
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    columns = width - _LEFT - 2
    cells = [[" "] * columns for _ in range(height)]
    for mark, curve in reversed(curves):  # the first one on top
        place = (curve.images - x0) / (x1 - x0) if x1 > x0 else np.full(len(curve.images), 0.5)
        column = np.clip((place * columns).astype(int), 0, columns - 1)
        for each in np.unique(column):
            inside = curve.values[column == each]
            inside = inside[np.isfinite(inside)]
            if len(inside):
                line = round((high - float(inside.mean())) / (high - low) * (height - 1))
                cells[line][int(each)] = mark
    lines: list[str] = []
    for number, line in enumerate(cells):
        value = high - number / (height - 1) * (high - low)
        label = short(float(f"{value:.3g}")) if number in (0, height // 2, height - 1) else ""
        lines.append(f"{label:>{_LEFT - 1}} │{''.join(line)}".rstrip())
    left, right = short(x0), f"{short(x1)} images"
    lines.append(f"{'':>{_LEFT - 1}} └{'─' * columns}")
    lines.append(f"{'':>{_LEFT}} {left}{right:>{columns - len(left)}}")
    return "\n".join(lines)

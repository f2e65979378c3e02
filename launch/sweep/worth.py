"""Judge a grid's result: the standard error of a score, and whether the best lies at the edge. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from launch.sweep.grid import Axis


def standard_error(score: float, *, images: int) -> float:
    """Standard error of a share, with one right and one wrong answer added: above 0 for a score of 1, too."""
    share = (score * images + 1) / (images + 2)
    return math.sqrt(share * (1 - share) / images)


def beyond(values: Collection[str], best: str) -> str | None:
    """The number behind the edge of `values` at which `best` lies, in even ratios where all are positive, otherwise in
    even steps; None: it is not at the edge, zero, which hardly any key goes below, or no plain number (of a length more
    is better anyway)."""
    try:
        edge, numbers = float(best), sorted({float(value) for value in values})
    except ValueError:
        return None
    if len(numbers) < 2 or edge == 0 or edge not in (numbers[0], numbers[-1]):
        return None
    inner = numbers[1] if edge == numbers[0] else numbers[-2]
    further = edge * edge / inner if numbers[0] > 0 else 2 * edge - inner
    if all(number.is_integer() for number in numbers):
        return None if round(further) in (0, edge) else f"{round(further)}"
    return f"{float(f'{further:.2g}'):g}"


def widened(axes: Sequence[Axis], points: Sequence[Mapping[str, str]], *, best: Mapping[str, str]) -> tuple[Axis, ...]:
    """The grid with one value more on each axis at whose edge the best point lies; the same grid: there is none.
    `points`: the values of all, and of the best, as the recipe has them."""
    more = [beyond({values[axis.key] for values in points}, best[axis.key]) for axis in axes]
    return tuple(
        replace(axis, values=(*axis.values, *filter(None, [value]))) for axis, value in zip(axes, more, strict=True)
    )

"""A curve as characters: braille dots, two across and four down in each, or stars where there is no braille. Pure.

Points that fall into one column are averaged, columns between points are joined by a straight line; values that are
not finite are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Glyphs = Literal["braille", "ascii"]
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # Unicode's, by row and column of a cell
_BLANK = 0x2800
_LABEL = 8  # characters of the values at the left


def chart(points: Sequence[tuple[int, float]], *, width: int, height: int, glyphs: Glyphs = "braille") -> list[str]:
    """`height` lines of at most `width` characters: the curve with its largest and smallest value at the left, and a
    line with the first and last step. Points are (step, value); steps ascend, but for a damaged file."""
    known = [(step, value) for step, value in points if math.isfinite(value)]
    rows, cells = max(2, height - 1), max(4, width - _LABEL - 1)
    if not known:
        return ["no values yet".center(width)[:width].rstrip(), *[""] * (height - 1)]
    across, down = (2, 4) if glyphs == "braille" else (1, 1)
    steps, values = zip(*known, strict=True)
    first, last, low, high = min(steps), max(steps), min(values), max(values)
    columns = _columns(known, first=first, last=last, count=cells * across)
    dots = [[False] * (cells * across) for _ in range(rows * down)]
    previous = None
    for column, value in sorted(columns.items()):
        row = _row(value, low=low, high=high, count=rows * down)
        for x, y in _line(previous or (column, row), (column, row)):
            dots[y][x] = True
        previous = (column, row)
    lines = []
    for number in range(rows):
        label = _label(high) if number == 0 else _label(low) if number == rows - 1 else ""
        cell_rows = dots[number * down : (number + 1) * down]
        drawn = "".join(_cell(cell_rows, cell * across, glyphs=glyphs) for cell in range(cells))
        lines.append(f"{label:>{_LABEL}} {drawn}".rstrip())
    ends = f"step {first:,}"
    after = f"{last:,}" if last != first else ""
    lines.append(f"{'':{_LABEL}} {ends}{after:>{max(0, cells - len(ends))}}"[:width].rstrip())
    return lines


def bar(share: float, *, width: int, glyphs: Glyphs = "braille") -> str:
    """A bar of `width` characters, `share` of which are full; never full before 1."""
    full, empty = ("█", "░") if glyphs == "braille" else ("#", "-")
    filled = width if share >= 1 else min(width - 1, int(max(0.0, share) * width))
    return full * filled + empty * (width - filled)


def _columns(points: Sequence[tuple[int, float]], *, first: int, last: int, count: int) -> dict[int, float]:
    """The mean of each column that has points."""
    found: dict[int, list[float]] = {}
    for step, value in points:
        found.setdefault((step - first) * (count - 1) // max(1, last - first), []).append(value)
    return {column: sum(value / len(values) for value in values) for column, values in found.items()}


def _row(value: float, *, low: float, high: float, count: int) -> int:
    """From the top."""
    # Halves, so that the difference of the largest floats is finite.
    value = min(max(value, low), high)  # a mean may be rounded past them, to infinity
    share = (value / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.5
    return min(count - 1, max(0, round((1 - share) * (count - 1))))


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The cells from `start` to `end`, both included, without gaps."""
    (x0, y0), (x1, y1) = start, end
    count = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [(x0 + round((x1 - x0) * i / count), y0 + round((y1 - y0) * i / count)) for i in range(count + 1)]


def _cell(rows: Sequence[Sequence[bool]], column: int, *, glyphs: Glyphs) -> str:
    if glyphs == "ascii":
        return "*" if rows[0][column] else " "
    bits = sum(bit for row, pair in zip(rows, _DOTS, strict=True) for on, bit in zip(row[column:], pair) if on)  # noqa: B905
    return chr(_BLANK + bits) if bits else " "


def _label(value: float) -> str:
    return f"{value:.4g}"[:_LABEL]

"""Draw curves in the terminal with plotille: braille lines, or a mark for each of several curves.

Averages the points of a column and joins columns by straight lines; leaves out non-finite values.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Glyphs = Literal["braille", "ascii"]
_LABEL = 8  # characters for the y labels
_BRAILLE = (2, 4)  # dots per character, across and down


def draw_curves(
    curves: Sequence[tuple[ArrayLike, ArrayLike]],
    *,
    width: int,
    height: int,
    marks: Sequence[str] = ("",),
    x_name: str = "step",
    show_x: Callable[[float], str] = "{:,.0f}".format,
) -> list[str]:
    """Draw curves (x, y), the first on top, in `height` lines of at most `width` characters, scaled to their range; the
    last line has the first and last x. `marks` has a character per curve; "" draws braille."""
    from plotille import Canvas

    known = [
        (marks[number % len(marks)], x[kept], y[kept])
        for number, (x, y) in enumerate(map(_arrays, curves))
        if (kept := np.isfinite(y)).any()
    ]
    if not known:
        return ["no values yet".center(width)[:width].rstrip(), *[""] * (height - 1)]
    rows, cells = max(2, height - 1), max(4, width - _LABEL - 1)
    across, down = (1, 1) if any(marks) else _BRAILLE
    first, last = min(x.min() for _, x, _ in known), max(x.max() for _, x, _ in known)
    low, high = min(y.min() for *_, y in known), max(y.max() for *_, y in known)
    canvas = Canvas(cells, rows, 0, 0, cells * _BRAILLE[0], rows * _BRAILLE[1])
    for mark, x, y in reversed(known):
        column = np.floor(scaled(x, first, last) * (cells * across - 1)).astype(int)
        share = scaled(y, low, high)
        found = np.unique(column)
        means = np.bincount(column, share)[found] / np.bincount(column)[found]
        columns = np.arange(found[0], found[-1] + 1)
        level = np.rint(np.interp(columns, found, means) * (rows * down - 1))
        at_x, at_y = columns * (_BRAILLE[0] // across), level * (_BRAILLE[1] // down)
        if mark:
            for place in zip(at_x, at_y, strict=True):
                canvas.point(*place, marker=mark)
        else:
            for start in range(max(1, len(columns) - 1)):
                end = min(start + 1, len(columns) - 1)
                canvas.line(at_x[start], at_y[start], at_x[end], at_y[end])
    lines = canvas.plot("\n").replace("\u2800", " ").split("\n")
    labels = [f"{high:.4g}"[:_LABEL], *[""] * (rows - 2), f"{low:.4g}"[:_LABEL]]
    shown = [f"{label:>{_LABEL}} {line}".rstrip() for label, line in zip(labels, lines, strict=True)]
    ends = f"{x_name} {show_x(first)}"
    after = show_x(last) if last != first else ""
    return [*shown, f"{'':{_LABEL}} {ends}{after:>{max(0, cells - len(ends))}}"[:width].rstrip()]


def bar(share: float, *, width: int, glyphs: Glyphs = "braille") -> str:
    """Draw a bar of `width` characters; full only if `share` is 1."""
    full, empty = ("█", "░") if glyphs == "braille" else ("#", "-")
    filled = width if share >= 1 else min(width - 1, int(max(0.0, share) * width))
    return full * filled + empty * (width - filled)


def _arrays(curve: tuple[ArrayLike, ArrayLike]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return np.asarray(curve[0], dtype=np.float64), np.asarray(curve[1], dtype=np.float64)


def scaled(values: ArrayLike, low: float, high: float) -> NDArray[np.float64]:
    """Scale [low, high] to [0, 1], clipped; 0.5 if these are equal; NaN stays. Halves avoid overflow of huge floats."""
    halves, span = np.asarray(values, dtype=np.float64) / 2, high / 2 - low / 2
    return np.clip((halves - low / 2) / span, 0.0, 1.0) if span > 0 else 0.5 + 0 * halves

"""Draw images with captions in rows and columns: batches, predictions, mistakes, contact sheets.

Small images (digits of 8 px) are scaled by a whole number without smoothing, in PNG and SVG; photographs are reduced
with antialiasing. Captions are escaped and shortened to fit. Takes some milliseconds a cell; reads no files.
"""

from __future__ import annotations

import unicodedata
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.images.channels import as_colours, usual_range
from shardvit.data_shards.text import one_line
from shardvit.pipeline.pictures.style import BAD, GRID, INK, MUTED, PNG_DOTS_PER_INCH, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Mark = Literal["none", "right", "wrong"]
MOST_LABELS = 3  # shown below an image

_FONT_POINTS = 8.0
_POINT = PNG_DOTS_PER_INCH / 72  # pixels
_FONT, _LINE, _GAP = _FONT_POINTS * _POINT, 1.32 * _FONT_POINTS * _POINT, 5.0 * _POINT  # pixels
_EDGE = round(2.0 * _POINT)  # pixels around everything: half a frame is outside its image
_FRAME = {"none": (GRID, 0.4), "right": (MUTED, 0.8), "wrong": (BAD, 1.8)}  # colour, points; a white image needs one


@dataclass(frozen=True)
class Cell:
    """One image of a grid."""

    image: NDArray[Any]  # uint8 [height, width, 3], or float32 [height, width, channels] of `images.channels`
    lines: tuple[str, ...] = ()  # captions below it, unescaped
    mark: Mark = "none"  # a frame, and a tick or a cross before the first line


def image_grid(
    cells: Sequence[Cell],
    *,
    columns: int,
    cell_inches: float = 1.0,
    together: int = 1,
    column_titles: Sequence[str] = (),
    shown: Sequence[int] = (),
) -> Figure:
    """Draw at least one cell, row by row, fitting images into squares of `cell_inches`. `together`: cells per group,
    such as an image and its crop, with a wider gap after it. `column_titles`: one per column, or none. Of images of
    channels it shows three (`shown`, from 1; default: the first), from two deviations below the mean to two above."""
    floats = [cell.image for cell in cells if cell.image.dtype != np.uint8]
    if floats:
        mean, std = usual_range(floats)
        cells = [replace(cell, image=as_colours(cell.image, mean=mean, std=std, shown=shown)) for cell in cells]
    columns = min(columns, len(cells))
    side = round(cell_inches * PNG_DOTS_PER_INCH)
    longest = max(max(cell.image.shape[:2]) for cell in cells)
    if longest <= side / 2:  # all are small: make the square a multiple of the largest
        side = longest * round(side / longest)
    gap, group_gap = (round(_GAP * 0.6), round(_GAP * 2.6)) if together > 1 else (round(_GAP * 1.4),) * 2
    lefts = [_EDGE + column * (side + gap) + column // together * (group_gap - gap) for column in range(columns)]
    head = _EDGE + (round(_LINE + 1.5 * _GAP) if column_titles else 0)
    lines = max(len(cell.lines) for cell in cells)
    row_height = round(side + (lines * _LINE + _GAP if lines else 0) + 1.6 * _GAP)
    width = lefts[-1] + side + _EDGE
    height = head + -(-len(cells) // columns) * row_height - round(0.6 * _GAP)

    figure, grid = new_figure(width=width / PNG_DOTS_PER_INCH, height=height / PNG_DOTS_PER_INCH)
    figure.set_layout_engine("none")
    axes: Axes = grid[0, 0]  # covers the figure, in pixels, y downwards
    axes.set_position((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    for left, title in zip(lefts, column_titles, strict=False):
        _write(axes, left, head - _GAP, title, room=side, va="bottom", color=MUTED)
    for number, cell in enumerate(cells):
        row, column = divmod(number, columns)
        _draw(axes, cell, x=lefts[column], y=head + row * row_height, side=side)
    axes.set(xlim=(0, width), ylim=(height, 0))
    return figure


def _draw(axes: Axes, cell: Cell, *, x: int, y: int, side: int) -> None:
    from matplotlib.patches import Rectangle

    image, scale = _fitted(cell.image, side=side)
    height, width = image.shape[0] * scale, image.shape[1] * scale
    left, top = x + (side - width) // 2, y + side - height
    how = "none" if scale > 1 else "nearest"  # none: the SVG embeds the original pixels
    axes.imshow(image, extent=(left, left + width, top + height, top), interpolation=how, aspect="auto")
    colour, points = _FRAME[cell.mark]
    frame = Rectangle((left, top), width, height, fill=False, color=colour, lw=2 * points, zorder=-1)
    axes.add_patch(frame)  # below the image, which covers its inner half
    at = y + side + _GAP
    for number, text in enumerate(cell.lines):
        indent = 0.0
        if number == 0 and cell.mark != "none":
            indent = _FONT
            _tick_or_cross(axes, cell.mark, x=x, y=at)
        colour = INK if number == 0 else MUTED
        _write(axes, x + indent, at + number * _LINE, text, room=side - indent, va="top", color=colour)


def _fitted(image: NDArray[np.uint8], *, side: int) -> tuple[NDArray[np.uint8], int]:
    """Return a small image with its whole-number scale, or one resized to fit the square with scale 1."""
    from PIL import Image

    longest = max(image.shape[:2])
    if longest <= side / 2:
        return image, side // longest
    height, width = (max(1, round(length * side / longest)) for length in image.shape[:2])
    if (height, width) == image.shape[:2]:
        return image, 1
    picture = Image.fromarray(np.ascontiguousarray(image)).resize((width, height), Image.Resampling.LANCZOS)
    return np.asarray(picture), 1


def _tick_or_cross(axes: Axes, mark: Mark, *, x: float, y: float) -> None:
    """Drawn as lines, since fonts may lack the characters."""
    if mark == "right":
        strokes, style = [([0.0, 0.35, 1.0], [0.6, 0.95, 0.15])], {"color": MUTED, "lw": 1.0}
    else:
        strokes, style = [([0.0, 0.85], [0.1, 0.95]), ([0.0, 0.85], [0.95, 0.1])], {"color": BAD, "lw": 1.5}
    size = 0.7 * _FONT
    for across, down in strokes:
        axes.plot(x + size * np.array(across), y + size * (np.array(down) + 0.15), solid_capstyle="round", **style)


def _write(axes: Axes, x: float, y: float, text: str, *, room: float, va: Literal["top", "bottom"], color: str) -> None:
    axes.text(x, y, shortened(text, points=room / _POINT), fontsize=_FONT_POINTS, va=va, color=color)


def shortened(text: str, *, points: float) -> str:
    """Escape a name for a figure and elide its middle if it is wider than `points` in 8-point letters."""
    text = one_line(text)
    if _width(text) <= points:
        return text

    def cut(kept: int) -> str:
        head = -(-kept * 2 // 3)
        return f"{text[:head].rstrip()}…{text[len(text) - (kept - head) :].lstrip()}"

    return cut(max(0, bisect_right(range(len(text)), points, key=lambda kept: _width(cut(kept))) - 1))


def label_names(labels: Sequence[int], *, classes: Sequence[str]) -> str:
    """List an image's labels on one line, at most `MOST_LABELS` entries; -1 means none."""
    names = [classes[label] for label in labels if label >= 0]
    if len(names) > MOST_LABELS:
        names = [*names[: MOST_LABELS - 1], f"{len(names) - MOST_LABELS + 1} more"]
    return ", ".join(names) or "no label"


def whole_percent(share: float) -> str:
    """Format a share as "61 %"; below 1 % keep one digit."""
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"


def _width(text: str) -> float:
    return _FONT_POINTS * sum(map(_share_of_em, text))


@lru_cache(maxsize=4096)
def _share_of_em(character: str) -> float:
    """Width of a character in ems; wide ones fall back to other fonts and count as squares."""
    if unicodedata.east_asian_width(character) in "WF":
        return 1.0
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    with warnings.catch_warnings(action="ignore"):  # missing glyphs
        return text_to_path.get_text_width_height_descent(character, FontProperties(size=100.0), False)[0] / 100

"""Images with captions in rows and columns, as one figure: batches, predictions, mistakes, contact sheets.

Small images (digits of 8 px) are enlarged by a whole number without smoothing, so that each pixel stays a square in the
PNG and in the SVG; photographs are reduced by an antialiasing filter. Cells are of one size, in which an image keeps
its proportions. Captions are text of any kind: made safe, and shortened with an ellipsis to the width of their cell.
Takes some milliseconds a cell. Reads no files and decodes nothing.
"""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from data_shards.text import one_line
from pipeline.pictures.style import BAD, GRID, INK, MUTED, PNG_DOTS_PER_INCH, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Mark = Literal["none", "right", "wrong"]
MOST_LABELS = 3  # of an image that are written below it

_POINTS = 8.0  # size of the captions' letters
_LINE = 1.32  # from one line to the next, in letter sizes
_GAP = 5.0  # points between an image and text
_WIDEST_ROW_TITLE = 110.0  # points
_FRAME = {"none": (GRID, 0.4), "right": (MUTED, 0.8), "wrong": (BAD, 1.8)}  # colour, points; white images end somewhere


@dataclass(frozen=True)
class Cell:
    """One image of a grid."""

    image: NDArray[np.uint8]  # [height, width, 3]
    lines: tuple[str, ...] = ()  # below it; text of any kind
    mark: Mark = "none"  # a frame, and a tick or a cross before the first line


def image_grid(
    cells: Sequence[Cell],
    *,
    columns: int,
    cell_inches: float = 1.0,
    together: int = 1,
    column_titles: Sequence[str] = (),
    row_titles: Sequence[str] = (),
) -> Figure:
    """The cells, at least one, row by row; a figure as large as they need, without a title of its own.

    Args:
        cells: what is shown.
        columns: cells in a row.
        cell_inches: side of the square that an image is fitted into.
        together: so many neighbours belong together, an image and what became of it: the gap after them is wider.
        column_titles: above the first row, one for each column; or none.
        row_titles: left of each row; or none.
    """
    assert cells and columns >= 1 and together >= 1
    layout = _Layout.of(
        cells,
        columns=min(columns, len(cells)),
        cell_inches=cell_inches,
        together=together,
        has_head=bool(column_titles),
        row_titles=row_titles,
    )
    figure, axes = _canvas(layout)
    for column, title in enumerate(column_titles[: layout.columns]):
        y = layout.head - layout.pixels(_GAP)
        _write(axes, layout.left(column), y, title, room=layout.side, layout=layout, align="bottom", colour=MUTED)
    for row, title in enumerate(row_titles[: layout.rows]):
        y = layout.top(row) + layout.side / 2
        _write(
            axes,
            layout.edge,
            y,
            title,
            room=layout.margin - 2 * layout.pixels(_GAP),
            layout=layout,
            align="center",
            colour=MUTED,
        )
    for number, cell in enumerate(cells):
        row, column = divmod(number, layout.columns)
        _draw(axes, cell, x=layout.left(column), y=layout.top(row), layout=layout)
    return figure


@dataclass(frozen=True)
class _Layout:
    """Where things are, in the picture's pixels from its top left corner; whole numbers for images."""

    columns: int
    rows: int
    side: int  # of the square of an image
    edge: int  # around everything: half of a frame lies outside its image
    margin: int  # left of the first column, for the rows' titles
    head: int  # above the first row, for the columns' titles
    gap: int  # between two columns
    group_gap: int  # between two that do not belong together
    together: int
    row_height: int

    @classmethod
    def of(
        cls,
        cells: Sequence[Cell],
        *,
        columns: int,
        cell_inches: float,
        together: int,
        has_head: bool,
        row_titles: Sequence[str],
    ) -> _Layout:
        side = round(cell_inches * PNG_DOTS_PER_INCH)
        longest = max(max(cell.image.shape[:2]) for cell in cells)
        if longest <= side / 2:  # all are small: the square is as large as a whole number of times the largest
            side = longest * round(side / longest)
        lines = max(len(cell.lines) for cell in cells)
        line, gap = cls.pixels(_POINTS * _LINE), cls.pixels(_GAP)
        text = lines * line + gap if lines else 0
        margin = max((_width(one_line(title)) for title in row_titles), default=0.0)
        return cls(
            columns=columns,
            rows=-(-len(cells) // columns),
            side=side,
            edge=(edge := round(cls.pixels(2.0))),
            margin=edge + (round(cls.pixels(min(margin + 1.0, _WIDEST_ROW_TITLE)) + 2 * gap) if row_titles else 0),
            head=edge + (round(line + 1.5 * gap) if has_head else 0),
            gap=round(gap * 0.6) if together > 1 else round(gap * 1.4),
            group_gap=round(gap * 2.6) if together > 1 else round(gap * 1.4),
            together=together,
            row_height=round(side + text + 1.6 * gap),
        )

    @staticmethod
    def pixels(points: float) -> float:
        return points * PNG_DOTS_PER_INCH / 72

    @property
    def width(self) -> int:
        return self.left(self.columns - 1) + self.side + self.edge

    @property
    def height(self) -> int:
        return self.head + self.rows * self.row_height - round(0.6 * self.pixels(_GAP))

    def left(self, column: int) -> int:
        groups = column // self.together
        return self.margin + column * (self.side + self.gap) + groups * (self.group_gap - self.gap)

    def top(self, row: int) -> int:
        return self.head + row * self.row_height


def _canvas(layout: _Layout) -> tuple[Figure, Axes]:
    """One axes over all of the figure, in pixels, with y downwards."""
    figure, grid = new_figure(width=layout.width / PNG_DOTS_PER_INCH, height=layout.height / PNG_DOTS_PER_INCH)
    figure.set_layout_engine("none")
    axes: Axes = grid[0, 0]
    axes.set_position((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set(xlim=(0, layout.width), ylim=(layout.height, 0))
    return figure, axes


def _draw(axes: Axes, cell: Cell, *, x: int, y: int, layout: _Layout) -> None:
    from matplotlib.patches import Rectangle

    height, width = cell.image.shape[:2]
    image, crisp = _fitted(cell.image, side=layout.side)
    scale = layout.side // max(height, width) if crisp else 1
    shown_height, shown_width = image.shape[0] * scale, image.shape[1] * scale
    left, top = x + (layout.side - shown_width) // 2, y + layout.side - shown_height
    axes.imshow(
        image,
        extent=(left, left + shown_width, top + shown_height, top),
        interpolation="none" if crisp else "nearest",  # none: the SVG has the image's own pixels, drawn as squares
        aspect="auto",
    )
    axes.set(xlim=(0, layout.width), ylim=(layout.height, 0))
    colour, points = _FRAME[cell.mark]
    place = (left, top), shown_width, shown_height
    axes.add_patch(Rectangle(*place, fill=False, color=colour, lw=2 * points, zorder=-1))  # its inner half is covered
    line = layout.pixels(_POINTS * _LINE)
    for number, text in enumerate(cell.lines):
        at = y + layout.side + layout.pixels(_GAP) + number * line
        indent = 0.0
        if number == 0 and cell.mark != "none":
            indent = layout.pixels(_POINTS)
            _tick_or_cross(axes, cell.mark, x=x, y=at, size=layout.pixels(_POINTS * 0.7))
        colour = INK if number == 0 else MUTED
        _write(axes, x + indent, at, text, room=layout.side - indent, layout=layout, align="top", colour=colour)


def _fitted(image: NDArray[np.uint8], *, side: int) -> tuple[NDArray[np.uint8], bool]:
    """The image at the size at which it is shown, or as it is if it is enlarged by a whole number (True)."""
    from PIL import Image

    longest = max(image.shape[:2])
    if longest <= side / 2:
        return image, True
    height, width = (max(1, round(length * side / longest)) for length in image.shape[:2])
    if (height, width) == image.shape[:2]:
        return image, False
    picture = Image.fromarray(np.ascontiguousarray(image)).resize((width, height), Image.Resampling.LANCZOS)
    return np.asarray(picture), False


def _tick_or_cross(axes: Axes, mark: Mark, *, x: float, y: float, size: float) -> None:
    """Drawn, as fonts may lack the characters."""
    if mark == "right":
        strokes = [([0.0, 0.35, 1.0], [0.6, 0.95, 0.15])]
    else:
        strokes = [([0.0, 0.85], [0.1, 0.95]), ([0.0, 0.85], [0.95, 0.1])]
    for across, down in strokes:
        axes.plot(
            [x + size * each for each in across],
            [y + size * (each + 0.15) for each in down],
            color=MUTED if mark == "right" else BAD,
            lw=1.0 if mark == "right" else 1.5,
            solid_capstyle="round",
        )


def _write(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    *,
    room: float,
    layout: _Layout,
    align: Literal["top", "center", "bottom"],
    colour: str,
) -> None:
    shown = shortened(text, points=room / layout.pixels(1.0))
    axes.text(x, y, shown, fontsize=_POINTS, va=align, ha="left", color=colour, parse_math=False)


def shortened(text: str, *, points: float, size: float = _POINTS) -> str:
    """A name made safe for a figure, without its middle if it is wider than so many points."""
    text = one_line(text)
    if _width(text, size=size) <= points:
        return text
    low, high = 0, len(text)
    while low < high:
        kept = (low + high + 1) // 2
        low, high = (kept, high) if _width(_without_middle(text, kept), size=size) <= points else (low, kept - 1)
    return _without_middle(text, low)


def label_names(labels: Sequence[int], *, classes: Sequence[str]) -> str:
    """An image's labels in a line, the first of many; -1 is none."""
    names = [classes[label] for label in labels if label >= 0]
    if len(names) > MOST_LABELS:
        names = [*names[: MOST_LABELS - 1], f"{len(names) - MOST_LABELS + 1} more"]
    return ", ".join(names) or "no label"


def percent(share: float) -> str:
    """A share in whole percent."""
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"


def _without_middle(text: str, kept: int) -> str:
    head = -(-kept * 2 // 3)
    return f"{text[:head].rstrip()}…{text[len(text) - (kept - head) :].lstrip()}"


def _width(text: str, *, size: float = _POINTS) -> float:
    """In points, without kerning."""
    return size * sum(map(_share_of_em, text))


@lru_cache(maxsize=4096)
def _share_of_em(character: str) -> float:
    """The width of a character in letter sizes; wide ones, which fall to other fonts, are squares."""
    if unicodedata.east_asian_width(character) in "WF":
        return 1.0
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    with warnings.catch_warnings(action="ignore"):  # of missing glyphs
        return text_to_path.get_text_width_height_descent(character, FontProperties(size=100.0), False)[0] / 100

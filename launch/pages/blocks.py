"""What a page is made of: text, tables, pictures, drawings and charts. Plain values; `page` renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ShownNumber:
    """A number with its unit in words of its own: "3:07 min", sorted by `value`."""

    text: str
    value: float


PageCell = str | int | float | ShownNumber | None


@dataclass(frozen=True)
class PageText:
    """A paragraph; "code": as it is typed, with its line ends; "note": set back."""

    text: str
    kind: Literal["prose", "note", "code"] = "prose"
    title: str = ""


@dataclass(frozen=True)
class PageTable:
    """A table; numbers stand on the right, None is an empty cell. It can be sorted by a click."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[PageCell]]
    title: str = ""
    caption: str = ""
    folded: bool = False  # shown when its title is clicked
    highlight: Literal["none", "last_column"] = "none"
    of: str = ""  # whose it is, beside the title

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Of each column, whether its cells are numbers."""
        columns = [[row[number] for row in self.rows if row[number] is not None] for number in range(len(self.columns))]
        return tuple(bool(cells) and not any(isinstance(cell, str) for cell in cells) for cells in columns)


@dataclass(frozen=True)
class PageImage:
    """A picture at one moment; `svg` is preferred where it is not much larger. `step` None: there is but one."""

    png: bytes
    svg: bytes | None = None
    step: int | None = None


@dataclass(frozen=True)
class PagePicture:
    """A picture with its words; of several images the last is shown, and a slider leads to the others."""

    title: str
    caption: str
    alt: str
    images: Sequence[PageImage]
    of: str = ""  # whose it is, beside the title


@dataclass(frozen=True)
class PageDrawing:
    """An SVG that this room has drawn, for the page itself: it takes the page's colours and fonts."""

    title: str
    caption: str
    svg: str  # markup; its texts are escaped
    legend: tuple[tuple[str, str], ...] = ()  # (class of the mark, label)


@dataclass(frozen=True)
class DrawnChart:
    """One curve chart, as it is without the script; `key` is its name for the script."""

    key: str
    title: str
    unit: str
    caption: str
    svg: str  # markup; its texts are escaped
    legend: tuple[tuple[str, str], ...]  # (class of the mark, label)
    rank: Literal["first", "more"] = "first"  # more: folded away


@dataclass(frozen=True)
class ChartBlock:
    """Charts over one x axis, whose cursors and zooms move together; `data`: what the script draws them from."""

    title: str
    charts: tuple[DrawnChart, ...]
    data: Mapping[str, Any]
    legend: tuple[tuple[str, str], ...] = ()  # of all charts: (class of the mark, label)


@dataclass(frozen=True)
class PageSection:
    """A fold: a heading, and what stands under it, other folds too."""

    title: str
    blocks: Sequence[PageBlock]
    intro: str = ""
    brief: str = ""  # a few words beside the heading, which are seen while it is closed
    state: Literal["open", "closed"] = "open"


PageBlock = PageText | PageTable | PagePicture | PageDrawing | ChartBlock | PageSection

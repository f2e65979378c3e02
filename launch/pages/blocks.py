"""Parts of a page: text, tables, pictures, drawings and charts. Plain values; `page` renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ShownNumber:
    """A number with its unit: "3:07 min", sorted by `value`."""

    text: str
    value: float


PageCell = str | int | float | ShownNumber | None
Legend = tuple[tuple[str, str], ...]  # (class of the mark, label)


@dataclass(frozen=True)
class PageText:
    """A paragraph; "code": verbatim, with its line ends; "note": set back."""

    text: str
    kind: Literal["prose", "note", "code"] = "prose"
    title: str = ""


@dataclass(frozen=True)
class PageTable:
    """A table, sorted by a click; numbers are right-aligned, None is an empty cell."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[PageCell]]
    title: str = ""
    caption: str = ""
    folded: bool = False  # opened by a click on its title
    highlight: Literal["none", "last_column"] = "none"
    of: str = ""  # which set or run, beside the title

    @property
    def numeric(self) -> tuple[bool, ...]:
        """For each column: are all its cells numbers?"""
        columns = [[row[number] for row in self.rows if row[number] is not None] for number in range(len(self.columns))]
        return tuple(bool(cells) and not any(isinstance(cell, str) for cell in cells) for cells in columns)


@dataclass(frozen=True)
class PageImage:
    """A picture at one step, as PNG or JPEG and perhaps as SVG; `step` None: there is only one."""

    raster: bytes
    svg: bytes | None = None
    step: int | None = None


@dataclass(frozen=True)
class PagePicture:
    """A picture with its words; the last image is shown, and a slider leads to the earlier ones."""

    title: str
    caption: str
    alt: str
    images: Sequence[PageImage]
    of: str = ""  # which set or run, beside the title


@dataclass(frozen=True)
class PageDrawing:
    """SVG markup of ours, inlined so that it takes the page's colours and fonts; its texts are escaped."""

    title: str
    caption: str
    svg: str
    legend: Legend = ()


@dataclass(frozen=True)
class DrawnChart:
    """One chart: `svg` is what a reader without scripts sees, `key` its name for the script."""

    key: str
    title: str
    unit: str
    caption: str
    svg: str
    legend: Legend
    rank: Literal["first", "more"] = "first"  # more: folded away


@dataclass(frozen=True)
class ChartBlock:
    """Charts over one x axis, with one cursor and one zoom; `data`: what the script draws them from."""

    title: str
    charts: tuple[DrawnChart, ...]
    data: Mapping[str, Any]
    legend: Legend = ()  # of all charts


@dataclass(frozen=True)
class PageSection:
    """A fold: a heading, and what stands under it, other folds too."""

    title: str
    blocks: Sequence[PageBlock]
    intro: str = ""
    brief: str = ""  # beside the heading, seen while it is closed
    state: Literal["open", "closed"] = "open"


PageBlock = PageText | PageTable | PagePicture | PageDrawing | ChartBlock | PageSection

"""Parts of a page as plain values: text, tables, pictures, drawings, charts. `page` renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ShownNumber:
    """A number shown with its unit ("3:07 min"), sorted by `value`."""

    text: str
    value: float


PageCell = str | int | float | ShownNumber | None
Legend = tuple[tuple[str, str], ...]  # (class of the mark, label)


@dataclass(frozen=True)
class PageText:
    """A paragraph. "code": verbatim; "note": muted."""

    text: str
    kind: Literal["prose", "note", "code"] = "prose"
    title: str = ""


@dataclass(frozen=True)
class PageTable:
    """A table, sortable by clicking a column; numbers align right, None is an empty cell."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[PageCell]]
    title: str = ""
    caption: str = ""
    folded: bool = False  # collapsed until its title is clicked
    highlight: Literal["none", "last_column"] = "none"
    of: str = ""  # which set or run, beside the title

    @property
    def numeric(self) -> tuple[bool, ...]:
        columns = [[row[number] for row in self.rows if row[number] is not None] for number in range(len(self.columns))]
        return tuple(bool(cells) and not any(isinstance(cell, str) for cell in cells) for cells in columns)


@dataclass(frozen=True)
class PageImage:
    """A picture at one step, as PNG or JPEG and perhaps SVG; `step` is None if there is only one."""

    raster: bytes
    svg: bytes | None = None
    step: int | None = None


@dataclass(frozen=True)
class PagePicture:
    """A picture with its texts; shows the last image, with a slider for earlier ones."""

    title: str
    caption: str
    alt: str
    images: Sequence[PageImage]
    of: str = ""  # which set or run, beside the title


@dataclass(frozen=True)
class PageDrawing:
    """Trusted SVG markup, inlined to take the page's colours and fonts; its texts are already escaped."""

    title: str
    caption: str
    svg: str
    legend: Legend = ()


@dataclass(frozen=True)
class DrawnChart:
    """One chart: `svg` for readers without scripts, `key` its name in the script."""

    key: str
    title: str
    unit: str
    caption: str
    svg: str
    legend: Legend
    rank: Literal["first", "more"] = "first"  # more: collapsed


@dataclass(frozen=True)
class ChartBlock:
    """Charts sharing one x axis, cursor and zoom; `data` is for the script."""

    title: str
    charts: tuple[DrawnChart, ...]
    data: Mapping[str, Any]
    legend: Legend = ()  # for all charts


@dataclass(frozen=True)
class PageSection:
    """A collapsible heading with blocks below it, including nested sections."""

    title: str
    blocks: Sequence[PageBlock]
    intro: str = ""
    brief: str = ""  # next to the heading, while closed
    state: Literal["open", "closed"] = "open"


PageBlock = PageText | PageTable | PagePicture | PageDrawing | ChartBlock | PageSection

"""A row of the table that `launch.bench.scale` prints; imported by the measures, which `scale` imports."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

RANKS = 1024
HOSTS = 128
SHARDS = 100_000
SAMPLES = 1_000_000_000

_HEADS = ("what", "before", "now", "wanted")
_WIDTH = 38


@dataclass(frozen=True)
class Row:
    """One quantity that grows with the number of ranks, shards or files."""

    what: str  # what is counted or measured, with its unit
    before: str  # on commit 56ab78a, or by the same algorithm as there
    now: str
    wanted: str  # the bound; "": none was set
    how: str  # what was simulated, and what was calculated from it

    @property
    def cells(self) -> tuple[str, str, str, str]:
        return self.what, self.before, self.now, self.wanted


def table(rows: Sequence[Row]) -> str:
    """The rows as plain text, each with a line below it that says how it was measured."""
    columns = [max(len(head), *(min(len(row.cells[i]), _WIDTH) for row in rows)) for i, head in enumerate(_HEADS)]
    lines = [_line(_HEADS, columns), _line(["-" * width for width in columns], columns)]
    for row in rows:
        wrapped = [textwrap.wrap(cell, _WIDTH) or [""] for cell in row.cells]
        for number in range(max(map(len, wrapped))):
            lines.append(_line([cell[number] if number < len(cell) else "" for cell in wrapped], columns))
        lines += textwrap.wrap(row.how, sum(columns) + 6, initial_indent="    ", subsequent_indent="    ")
        lines.append("")
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()

"""All of a page but its images, within a budget of bytes: what a run's folder holds may be of any size.

But for charts, a block takes half of what is left at most: a table loses its last rows, and what still has no room is
left out. A line says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from html import escape
from itertools import accumulate
from typing import Any

from data_shards.text import printable
from launch.pages.blocks import ChartBlock, PagePicture, PageSection, PageTable
from pipeline.pictures.style import plain

_TAGS_BYTES, _CELL_BYTES = 300, 70  # the most that the markup of a block or a cell takes


class Fitting:
    """`left_bytes` are for what comes next; `notes`: what was left out."""

    def __init__(self, most_bytes: int) -> None:
        self.left_bytes = most_bytes
        self.notes: list[str] = []

    def section(self, section: PageSection) -> PageSection:
        """The section with as much of its blocks as there is room for."""
        fitted = [self._block(block) for block in section.blocks]
        return replace(section, blocks=[block for block in fitted if block is not None])

    def _block(self, block: Any) -> Any:
        if isinstance(block, PageSection):
            return self.section(block)
        room = self.left_bytes if isinstance(block, ChartBlock) else self.left_bytes // 2
        if isinstance(block, PageTable):
            left = room - _html_bytes(replace(block, rows=()))
            count = sum(num_bytes <= left for num_bytes in accumulate(map(_html_bytes, block.rows)))
            if count < len(block.rows):
                self._note(block, f"the page has room for {count:,} of its {len(block.rows):,} rows")
                block = replace(block, rows=block.rows[:count])
        num_bytes = _html_bytes(block)
        if num_bytes > room:
            return self._note(block, "the page has no room for it")
        self.left_bytes -= num_bytes
        return block

    def _note(self, block: Any, what: str) -> None:
        self.notes.append(f"“{plain(block.title, longest=80)}”: {what}")


def _html_bytes(value: Any) -> int:
    """Of a block or a part of one, above rather than below; images themselves are not counted."""
    match value:
        case str():
            return _CELL_BYTES // 2 + len(escape(printable(value)).encode())
        case PagePicture():  # each image has words of its own
            return len(value.images) * (_TAGS_BYTES + _html_bytes([value.title, value.caption, value.alt]))
        case Mapping():  # data for the script, in which markup is escaped
            text = json.dumps(value)
            return len(text) + 5 * sum(map(text.count, "<>&"))
        case tuple() | list():
            return sum(map(_html_bytes, value))
        case _ if is_dataclass(value):
            parts = {each.name: getattr(value, each.name) for each in fields(value)}
            return _TAGS_BYTES + len(parts.pop("svg", "")) + sum(map(_html_bytes, parts.values()))
        case _:
            return _CELL_BYTES

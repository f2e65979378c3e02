"""A text file that only grows, a record a line: what metrics.jsonl and events.jsonl are written by.

One record is one `write` of a file opened for appending, so a reader never sees half of it mixed with another, and a
killed process loses nothing that was appended; a power loss may cost the last seconds, as nothing is flushed to disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from data_shards.durable import break_links
from data_shards.safe_paths import open_inside


class GrowingFile:
    """A file to which lines are appended; made if it is missing. Its folder is not."""

    def __init__(self, path: Path) -> None:
        break_links(path)
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115  (closed by close())
        self._torn = _lacks_its_end(path)

    def append(self, line: bytes) -> None:
        """Write `line`, which has no line end, as a line of its own; OSError if the disk is full."""
        # After a kill, or if the disk was full for a moment: end the half-written line first.
        line = (b"\n" if self._torn else b"") + line + b"\n"
        self._torn = True
        while line:
            line = line[self._file.write(line) :]
        self._torn = False

    def close(self) -> None:
        """Closing twice is harmless."""
        self._file.close()


def lines_from(path: Path, *, offset: int = 0) -> Iterator[bytes]:
    """The lines from a byte on, with their ends, even while the file is written: the last may lack its end. None if
    the file does not exist. OSError: it is no regular file, or a link to another folder's."""
    try:
        file = open_inside(path, folder=path.parent)
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        yield from file


def _lacks_its_end(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"

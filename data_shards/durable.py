"""Atomic replacement of files, and flushes to disk, for all packages but `model` (`model.replacing`).

A file is written beside its place and renamed. Surviving a power failure costs one flush of the disk per file and
folder; surviving a kill costs nothing. All raise OSError when the disk is full or fails.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

Sync = Literal["disk", "none"]
Writers = Literal["one", "several"]


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(folder: Path, *, below: Path) -> None:
    """Make `folder` and those between it and `below`, but not that one: a run folder that is gone is not made again.

    Raises FileNotFoundError if `below` is not there.
    """
    for part in reversed([folder, *folder.parents]):
        if part != below and part.is_relative_to(below):
            part.mkdir(exist_ok=True)
    if folder == below and not below.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(below))


def write_text(path: Path, text: str) -> None:
    """Write a new file of text, and wait until its content is on the disk."""
    path.write_text(text, encoding="utf-8")
    flush(path)


def replace_text(path: Path, text: str, *, sync: Sync = "disk", writers: Writers = "one") -> None:
    """`replaced` for a small file of text."""
    with replaced(path, sync=sync, writers=writers) as beside:
        beside.write_text(text, encoding="utf-8")


@contextmanager
def replaced(path: Path, *, sync: Sync = "disk", writers: Writers = "one") -> Iterator[Path]:
    """Gives a path to write a file at; when the block ends well, that file takes the place of `path`, atomically.

    A reader, or a restart after a kill, sees the old file or the whole new one.

    A folder that is gone is not made again.

    Args:
        path: of the file.
        sync: "disk": the new file is on the disk first, and its name when this returns, so that a power failure leaves
            a whole file as well. "none": costs no flush.
        writers: "several": other processes may write the same file; the last one wins.
    """
    beside = path.with_name(f".{path.name}.writing" if writers == "one" else f".{path.name}.{os.getpid()}.tmp")
    try:
        yield beside
        if sync == "disk":
            flush(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    if sync == "disk":
        for folder in (path.parent, path.parent.parent):  # the latter may have got the former just now
            with suppress(PermissionError):  # a home's parent may be closed to its users
                flush(folder)

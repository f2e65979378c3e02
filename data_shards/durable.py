"""Small files and names that outlive a loss of power. Costs one flush of the disk per file and folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk.

    Raises:
        OSError: the disk is full or fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(folder: Path, *, below: Path) -> None:
    """Make `folder` and those between it and `below`, but not that one: a run folder that is gone is not made again.

    Raises:
        FileNotFoundError: `below` is not there.
    """
    for part in reversed([folder, *folder.parents]):
        if part != below and part.is_relative_to(below):
            part.mkdir(exist_ok=True)
    if folder == below and not below.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(below))


def write_text(path: Path, text: str) -> None:
    """Write a new file of text, and wait until its content is on the disk.

    Raises:
        OSError: the disk is full or fails.
    """
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Write a file that is there wholly or as it was before, killed or without power at any moment.

    Raises:
        OSError: the disk is full or fails, or the folder above the file's own is gone.
    """
    path.parent.mkdir(exist_ok=True)
    beside = path.with_name(f".{path.name}.writing")
    write_text(beside, text)
    beside.replace(path)
    for folder in (path.parent, path.parent.parent):  # the latter may have got the former just now
        flush(folder)

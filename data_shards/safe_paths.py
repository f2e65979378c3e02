"""Read only files inside a stranger's folder: no links out of it, FIFOs or devices (30 µs a file)."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from shardvit.data_shards.errors import UserError


def is_inside(path: Path, *, folder: Path) -> bool:
    """True if `path`, which need not exist, is in `folder` once all links are followed."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def require_inside(path: Path, *, folder: Path) -> None:
    """UserError if `path`, or anything below it, is a link out of `folder`."""
    for each in (path, *path.rglob("*")):
        if not is_inside(each, folder=folder):
            raise UserError(f"{each} is a link out of {folder}, and is not followed: put the file itself there")


def open_inside(path: Path, *, folder: Path) -> BinaryIO:
    """Open a file in `folder` for reading; OSError if it is missing, not a regular file, or outside the folder."""
    if not is_inside(path, folder=folder):
        raise OSError(errno.ELOOP, f"a link leads out of {folder}", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # do not wait for a FIFO
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_inside(path: Path, *, folder: Path) -> bytes:
    """Read a file in `folder`; OSError as in `open_inside`."""
    with open_inside(path, folder=folder) as file:
        return file.read()

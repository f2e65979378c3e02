"""Replace files atomically and flush them to disk (`model` has its own: `model.saved.atomic`).

To survive a power failure costs a disk flush per file and folder; a kill, nothing. OSError if the disk is full or
fails.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

Sync = Literal["disk", "none"]
Writers = Literal["one", "several"]


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(folder: Path, *, below: Path) -> None:
    """Create `folder` and its parents below `below`; FileNotFoundError if `below`, such as a run folder, is gone."""
    for part in reversed([folder, *folder.parents]):
        if part != below and part.is_relative_to(below):
            part.mkdir(exist_ok=True)
    if folder == below and not below.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(below))


def write_text(path: Path, text: str) -> None:
    """Write a new text file and flush it."""
    path.write_text(text, encoding="utf-8")
    flush(path)


def replace_text(path: Path, text: str, *, sync: Sync = "disk", writers: Writers = "one") -> None:
    """Write a small text file with `replaced`."""
    with replaced(path, sync=sync, writers=writers) as beside:
        beside.write_text(text, encoding="utf-8")


def replace_lines(path: Path, entries: Iterable[object]) -> None:
    """Write one JSON entry a line with `replaced`; bytes in names that are not UTF-8 become JSON escapes."""
    with replaced(path) as beside:
        beside.write_bytes(lines_text(entries))


def lines_text(entries: Iterable[object]) -> bytes:
    """Format entries for `replace_lines`."""
    lines = (json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
    return "".join(lines).encode("utf-8", "backslashreplace")


def break_links(path: Path) -> None:
    """Make a hard-linked `path` (`cp -rl`) a file of its own; missing is fine, a symbolic link an OSError (ELOOP)."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))
    with suppress(FileNotFoundError):
        if path.stat().st_nlink > 1:
            with replaced(path, sync="none", writers="several") as beside:
                shutil.copy2(path, beside)


@contextmanager
def locked(path: Path, *, waiting: Callable[[], object] = bool) -> Iterator[None]:
    """Hold a file lock, which the kernel releases when the process ends; call `waiting` before blocking on it."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def replaced(path: Path, *, sync: Sync = "disk", writers: Writers = "one") -> Iterator[Path]:
    """Yield a path to write to; if the block succeeds, that file atomically replaces `path`.

    The folder must exist. Sync "disk" flushes file and folder, so that a power failure leaves a whole file too. Writers
    "several" lets other processes write the same file; the last one wins.
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
        for folder in (path.parent, path.parent.parent):  # the folder itself may be new
            with suppress(PermissionError):  # users may not open the parent of their home
                flush(folder)

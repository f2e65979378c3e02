"""The files in the cache's folder: complete shards, shards in progress, indexes; and which may be removed.

Only files with our own names are seen or removed: the folder may be a user's home. Functions that decide over files of
other processes need the folder's lock (see `cache`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Evict = Literal["any", "idle"]

# A shard that was not touched for so long is neither in use nor about to be.
IDLE_SECONDS = 30.0
TOUCH_SECONDS = 5.0  # how often a shard in use, or prefetched, needs `touch`
TAR, PART = ".tar", ".tar.part"
_OURS = re.compile(r"\.?[\w.+-]*-[0-9a-f]{32}(\.tar|\.tar\.part|\.[a-z]+\.npz|\.[a-z]+\.npz\.\d+\.tmp)")


def is_evicted(descriptor: int) -> bool:
    """Whether an open shard was removed from the cache: closing it frees its bytes."""
    return os.fstat(descriptor).st_nlink == 0


def touch(descriptor: int) -> None:
    """Mark an open shard as in use now; a microsecond or two."""
    with contextlib.suppress(PermissionError):  # a cache that another user has filled
        os.utime(descriptor)


@dataclass(frozen=True)
class CachedFile:
    """A file of the shard `stem`; `kind` is "tar", "part" (a tar in progress), "npz" (an index) or "tmp"."""

    path: Path
    stem: str
    kind: str
    num_bytes: int
    modified: float  # seconds since 1970


def files_in(folder: Path) -> list[CachedFile]:
    """All our files, after removing stale ones of dead processes; needs the folder's lock."""
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _OURS.fullmatch(entry.name)
            if match is None:
                continue
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                kind = {TAR: "tar", PART: "part"}.get(match[1]) or entry.name.rpartition(".")[2]
                stem = entry.name.removesuffix(match[1])
                file = CachedFile(Path(entry.path), stem, kind, status.st_size, status.st_mtime)
                if not _is_stale(file):
                    files.append(file)
    present = {file.stem for file in files if file.kind in ("tar", "part")}
    for orphan in [file for file in files if file.kind == "npz" and file.stem not in present]:
        orphan.path.unlink(missing_ok=True)
        files.remove(orphan)
    return files


def victims(files: list[CachedFile], *, evict: Evict) -> Iterator[CachedFile]:
    """Complete shards, least recently used first."""
    latest = time.time() - IDLE_SECONDS if evict == "idle" else float("inf")
    tars = [file for file in files if file.kind == "tar" and file.modified <= latest]
    yield from sorted(tars, key=lambda file: file.modified)


def remove(victim: CachedFile, files: list[CachedFile]) -> int:
    """Remove a shard and its indexes; returns their bytes."""
    going = [file for file in files if file.stem == victim.stem and file.kind in ("tar", "npz")]
    for file in going:
        file.path.unlink(missing_ok=True)
    return sum(file.num_bytes for file in going)


def _is_stale(file: CachedFile) -> bool:
    """Whether a dead process left it; it is then removed."""
    if file.kind == "tmp" and time.time() - file.modified > IDLE_SECONDS:
        file.path.unlink(missing_ok=True)
        return True
    if file.kind != "part":
        return False
    try:
        descriptor = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        if not try_lock(descriptor) or not is_at(descriptor, file.path):
            return False
        file.path.unlink()
        return True
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Whether we got the file's lock, which ends with the descriptor or the process."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False

"""A disk that is full or cannot be written, in one sentence that names the path and what to change.

The system's error often has no path: a write fails long after its file was opened. Then the places that a stage writes
to are looked at, and the one that is full is named. Costs nothing until there is an error.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

_ADVICE = {
    errno.ENOSPC: "the disk is full: make room there, and the same command goes on",
    errno.EDQUOT: "your quota there is used up: make room, and the same command goes on",
    errno.EROFS: "it lies on a read-only file system: mount it writable, or choose another folder with --runs",
    errno.EACCES: "permission denied: change its owner or mode, or choose another folder with --runs",
    errno.EPERM: "the system does not permit it: change its owner or mode, or choose another folder with --runs",
}
_SHARED_MEMORY = Path("/dev/shm")  # through which worker processes hand over what they have read
_SHM_ADVICE = "it is full: give it more room (docker run --shm-size), or read with threads (data.worker_kind=thread)"
_FULL_BYTES = 2**20


def disk_problem(error: BaseException, *, folder: Path) -> str | None:
    """The sentence; None: the error is of another kind.

    Args:
        error: what was raised; what it was raised from is looked at, too.
        folder: the run folder, where most of what a run writes lies.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _ADVICE:
            path = seen.filename2 or seen.filename
            if isinstance(path, str | os.PathLike):
                return f"{os.fspath(path)} cannot be written: {_ADVICE[seen.errno]}"
            if seen.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):  # of a write to an open file, for certain
                place = _full_place([folder, Path(tempfile.gettempdir()), _SHARED_MEMORY])
                return f"{place} cannot be written: {_SHM_ADVICE if place == _SHARED_MEMORY else _ADVICE[seen.errno]}"
        seen = seen.__cause__
    return None


def _full_place(places: Sequence[Path]) -> Path:
    """The first one whose disk is full; if none is any more, the first one."""
    for place in places:
        try:
            room = os.statvfs(place)
        except OSError:
            continue
        if room.f_bavail * room.f_frsize < _FULL_BYTES:
            return place
    return places[0]

"""Explain a full or read-only disk, or a deleted or renamed run folder, in one sentence.

Disk-full errors of writes carry no path: name whichever place is full. A renamed folder keeps its open files, and
another may take its name, so hold it open and compare (one stat). It is never recreated (`durable.make_folders`).
"""

import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from shardvit.data_shards.errors import UserError

_ADVICE = {
    errno.ENOSPC: "the disk is full: make room there, and the same command resumes",
    errno.EDQUOT: "your quota there is used up: make room, and the same command resumes",
    errno.EROFS: "it is on a read-only file system: mount it writable, or choose another folder with --runs",
    errno.EACCES: "permission denied: change its owner or mode, or choose another folder with --runs",
    errno.EPERM: "the system does not permit it: change its owner or mode, or choose another folder with --runs",
}
_SHARED_MEMORY = Path("/dev/shm")  # through which data workers pass batches
_SHM_ADVICE = "it is full: give it more room (docker run --shm-size), or read with threads (data.worker_kind=thread)"
_FULL_BYTES = 2**20


def disk_problem(error: BaseException, *, folder: Path) -> str | None:
    """Return the sentence if `error` or one of its causes is a disk error, else None; `folder` is the run's."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _ADVICE:
            path = seen.filename2 or seen.filename
            if isinstance(path, str | os.PathLike):
                return f"{os.fspath(path)} cannot be written: {_ADVICE[seen.errno]}"
            if seen.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):  # no path: a write to an open file
                place = _full_place([folder, Path(tempfile.gettempdir()), _SHARED_MEMORY])
                return f"{place} cannot be written: {_SHM_ADVICE if place == _SHARED_MEMORY else _ADVICE[seen.errno]}"
        seen = seen.__cause__
    return None


def _full_place(places: Sequence[Path]) -> Path:
    for place in places:
        with suppress(OSError):
            disk = os.statvfs(place)
            if disk.f_bavail * disk.f_frsize < _FULL_BYTES:
                return place
    return places[0]


def gone(folder: Path) -> str:
    """Return the sentence for a lost run folder."""
    return (
        f"the run folder {folder} is gone: it was deleted or renamed during the run, and nothing was written in its "
        "place; restore it under this name, and the same command resumes"
    )


class Presence:
    """A run folder, held open; UserError if it does not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(gone(folder)) from None

    def is_gone(self) -> bool:
        """True if the folder has certainly lost its name; an unreachable file server does not count."""
        try:
            return not os.path.samestat(os.stat(self.folder), os.fstat(self._descriptor))
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)

    def demand(self) -> None:
        if self.is_gone():
            raise UserError(gone(self.folder))

    @contextmanager
    def demanded(self) -> Iterator[None]:
        """Turn any error within into a UserError if the folder is gone."""
        try:
            yield
        except Exception as error:
            if self.is_gone():
                raise UserError(gone(self.folder)) from error
            raise

    def close(self) -> None:
        os.close(self._descriptor)

"""Small, full and read-only disks for the tests: tmpfs in a mount namespace of this process alone.

Nothing of it is seen outside, and it goes when the process does, however that ends. Needs root (CAP_SYS_ADMIN); where
that is not given, `require_mounts` skips the test.
"""

import ctypes
import errno
import functools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_CLONE_NEWNS, _MS_RDONLY, _MS_REMOUNT, _MS_REC, _MS_SLAVE, _MNT_DETACH = 0x20000, 1, 32, 0x4000, 1 << 19, 2
_WRITERS_SECONDS = 60.0  # for killed processes to be gone
_libc = ctypes.CDLL(None, use_errno=True)


def require_mounts() -> None:
    """Skip the test unless this process may mount."""
    if problem := _own_namespace():
        pytest.skip(f"mounting a small disk is not permitted here ({problem})")


@contextmanager
def small_disk(folder: Path, *, size_bytes: int) -> Iterator[Path]:
    """`folder`, made when missing, is a disk of that size for as long as this lasts; what is in it is lost."""
    require_mounts()
    folder.mkdir(parents=True, exist_ok=True)
    _mount("tmpfs", folder, options=f"size={size_bytes}")
    try:
        yield folder
    finally:
        _libc.umount2(os.fsencode(folder), _MNT_DETACH)


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """A `small_disk`, read-only for as long as this lasts; begins when the last of its writers has ended."""
    deadline = time.monotonic() + _WRITERS_SECONDS
    while True:
        try:
            _mount("tmpfs", disk, flags=_MS_REMOUNT | _MS_RDONLY)
            break
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    try:
        yield
    finally:
        _mount("tmpfs", disk, flags=_MS_REMOUNT)


def fill(disk: Path, *, leave_bytes: int = 0) -> Path:
    """A file that takes all the space of `disk` but so much (to within a page of memory)."""
    status = os.statvfs(disk)
    filler = disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, status.f_bavail * status.f_frsize - leave_bytes))
    return filler


@functools.cache
def _own_namespace() -> str:
    """What keeps this process from having mounts of its own; empty: nothing, it has."""
    try:
        if _libc.unshare(_CLONE_NEWNS):
            raise _last_error("unshare")
        _mount(None, Path("/"), flags=_MS_REC | _MS_SLAVE)
    except OSError as error:
        return str(error)
    return ""


def _mount(kind: str | None, folder: Path, *, flags: int = 0, options: str = "") -> None:
    named = None if kind is None else kind.encode()
    if _libc.mount(named, os.fsencode(folder), named, ctypes.c_ulong(flags), options.encode() or None):
        raise _last_error(f"mount of {folder}")


def _last_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")

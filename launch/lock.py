"""One run folder, one run: an advisory lock that the kernel lets go of when its owner dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_shards.errors import UserError


@contextmanager
def locked(path: Path, *, what: str, wait_seconds: float = 0.0) -> Iterator[None]:
    """Hold the lock file `path`, which names its owner.

    Args:
        path: the file; made when missing, never removed (removing it would let two owners in).
        what: what is locked, for the message.
        wait_seconds: how long to wait for the present owner.

    Raises:
        UserError: somebody else holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
                    raise UserError(
                        f"{what} is in use by {owner} (lock {path}): wait for it, or stop it first"
                    ) from None
                time.sleep(0.2)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)

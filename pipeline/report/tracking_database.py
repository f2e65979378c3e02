"""MLflow's SQLite file, there wholly or not at all.

MLflow makes some fifty tables in several seconds, and never mends a database in which a kill left it half-way: every
later attempt fails in the same migration. So the file is made beside its place and gets its name when it is whole.
Costs nothing where it is there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from data_shards.durable import flush

_PREFIX = "sqlite:///"
_FORGOTTEN_SECONDS = 3600.0  # after which a file beside is a killed process's


def make_database(uri: str, *, create: Callable[[str], object]) -> None:
    """Make the SQLite file of a store's address, if it is one and is not there; several processes may.

    Args:
        uri: sqlite:///FILE; others are left alone.
        create: makes the tables in the store of an address.

    Raises:
        OSError: the disk is full or fails.
    """
    name = uri.removeprefix(_PREFIX)
    if not uri.startswith(_PREFIX) or not name or name.startswith((":", "file:")) or "?" in name or Path(name).exists():
        return
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    _forget(path)
    beside = path.with_name(f".{path.name}.making-{os.getpid()}")
    for leftover in (beside, beside.with_name(f"{beside.name}-journal")):  # of a process that had the same number
        leftover.unlink(missing_ok=True)
    try:
        create(f"{_PREFIX}{beside}")
        flush(beside)
        try:
            os.link(beside, path)
        except FileExistsError:
            pass  # another process was quicker, and its runs are in that one
        except OSError:  # a file system without links
            beside.rename(path)
        flush(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def _forget(path: Path) -> None:
    """Remove what killed processes left."""
    for leftover in path.parent.glob(f".{path.name}.making-*"):
        with suppress(OSError):  # gone meanwhile
            if time.time() - leftover.stat().st_mtime > _FORGOTTEN_SECONDS:
                leftover.unlink()

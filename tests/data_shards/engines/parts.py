"""A cheap work for the engines' laws, and what its parts left."""

import os
import signal
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from shardvit.data_shards.errors import UserError


def note(folder: Path, part: Hashable) -> int:
    """Leave a file for each try of a part; returns how many there are."""
    own = folder / f"{part}-{time.time_ns()}-{os.getpid()}"
    own.write_text("")
    return len(list(folder.glob(f"{part}-*")))


def square(folder: Path, part: int) -> tuple[int, int]:
    note(folder, part)
    return part * part, os.getpid()


def dies(folder: Path, part: int) -> int:
    """Parts 3 and 5 kill their process: part 3 always, part 5 once."""
    tries = note(folder, part)
    if part == 3 or (part == 5 and tries == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return part


def complains(_: Any, part: int) -> int:
    if part == 2:
        raise UserError("photos.csv: line 3 has no label")
    return part


def waits(folder: Path, part: int) -> int:
    """Part 0 ends when three others have begun; they, when there is a file `go`."""
    note(folder, part)
    while not ((folder / "go").exists() if part else len(list(folder.glob("[!0]*-*"))) >= 3):
        time.sleep(0.02)
    return part


def tells(_: Any, part: str) -> Any:
    import shardvit

    if part == "cwd":
        return os.getcwd()
    return os.path.realpath(shardvit.__file__)

"""Clocks that a test sets on: what would take minutes takes none, and no slow machine can be earlier than the test."""

import socket
import time
from pathlib import Path

HOUR = 3600.0

# For a package `launch` that is found before ours: an agent's clock is an hour on for each of its host's files.
AGENTS_CLOCK = f"""
import glob, socket, sys, time
if "shardvit.launch.hosts.agent" in sys.orig_argv:
    real = time.monotonic
    time.monotonic = lambda: real() + {HOUR} * len(glob.glob(f"hour-*-of-{{socket.gethostname()}}"))
"""


def pass_an_hour(folder: Path, *, host: str | None = None) -> None:
    """For the agent that runs in `folder`, on this host or another."""
    name = host or socket.gethostname()
    number = len(list(folder.glob(f"hour-*-of-{name}")))
    (folder / f"hour-{number}-of-{name}").touch()


class Clock:
    """In place of a module's `time`: an hour on as soon as `file` is there."""

    sleep = staticmethod(time.sleep)

    def __init__(self, file: Path) -> None:
        self._file = file

    def monotonic(self) -> float:
        return time.monotonic() + HOUR * self._file.exists()

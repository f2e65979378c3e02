"""The processes of a run on this machine: those that carry a mark in their environment.

Neither the process group nor the tree would do: torchrun gives each rank a session of its own, a killed launcher leaves
orphans, and on another host nothing of ours is their parent. Costs one look at every process of this user.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

import psutil

RANK_COMMAND = ["-u", "-m", "launch.train"]
_KILL_SECONDS = 30.0  # a process that waits for a broken disk dies later
_LEAST_LOOKS = 100  # however long that takes: the time may have passed while this process itself was paused
_LOOK_SECONDS = 0.02
_TURN_SECONDS = 0.05


def marked(name: str, value: str) -> list[psutil.Process]:
    """All processes but this one whose environment variable `name` is `value`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(name) == value:
                found.append(process)
        except (psutil.Error, OSError):  # gone, or somebody else's
            continue
    return found


def ranks(name: str, value: str) -> list[psutil.Process]:
    """Those of them that train."""
    found = []
    for process in marked(name, value):
        try:
            if process.cmdline()[1:4] == RANK_COMMAND:
                found.append(process)
        except psutil.Error:
            continue
    return found


def terminate(processes: list[psutil.Process]) -> None:
    """Ask them to stop: ranks finish their step and save."""
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            process.terminate()


def kill_all(name: str, value: str) -> None:
    """End all that carry the mark, and what they start meanwhile."""
    deadline, looks = time.monotonic() + _KILL_SECONDS, 0
    while (alive := marked(name, value)) and (looks < _LEAST_LOOKS or time.monotonic() < deadline):
        looks += 1
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(_LOOK_SECONDS)


def join_thread(thread: threading.Thread, *, seconds: float) -> None:
    """Wait for a thread's end, in short turns: when the whole process was paused, one of them is lost and not all."""
    for _ in range(round(seconds / _TURN_SECONDS)):
        thread.join(_TURN_SECONDS)
        if not thread.is_alive():
            return

"""Is that process still the one it was? Numbers of processes mean the same within one machine, and are used again.

Asked by a lock about its owner and by a rank about its neighbours. Costs a read of /proc. No torch here.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import psutil

_START_FIELD = 19  # of /proc/PID/stat, counted from the state on: ticks since the machine was started


@cache
def this_machine() -> str:
    """What two processes have in common if each can find the other by its number: kernel and name space.

    Names of hosts would not do: containers on one host may share its name, and not its processes.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return os.uname().nodename


def process_started(pid: int) -> float | None:
    """When a process began, in a unit of the system's; None: there is none, or it is dead and not yet collected.

    Not psutil's create_time where it can be helped: that is a time of day, and moves when the clock is set.
    """
    if Path("/proc/self/stat").exists():
        fields = _stat(pid)
        return None if fields is None or fields[0] in "ZX" else float(fields[_START_FIELD])
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def describe_process(pid: int) -> str:
    """What the kernel says a process does, for a message; empty where that tells nothing."""
    fields = _stat(pid)
    return {
        "T": "it is stopped by a signal (SIGSTOP or Ctrl-Z)",
        "t": "it is held by a debugger",
        "D": "it waits for a disk or a driver and cannot be interrupted",
        "R": "it is computing",
    }.get(fields[0] if fields else "", "")


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; the name before them may contain anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()

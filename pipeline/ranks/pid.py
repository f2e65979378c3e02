"""PID reuse, detected by a process's start time, for locks and ranks. Costs one read of /proc; imports no torch."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import psutil

_START_FIELD = 19  # of /proc/PID/stat, counted from the state: clock ticks since boot


@cache
def this_machine() -> str:
    """Equal for two processes that can see each other's PIDs: same kernel, same PID namespace. Host names would not do,
    as containers may share the host's name and not its PIDs."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return os.uname().nodename


def process_started(pid: int) -> float | None:
    """A process's start time, for comparison only; None: no such process, or a zombie. Without /proc, psutil's
    create_time, which moves when the clock is set."""
    if Path("/proc/self/stat").exists():
        fields = _stat(pid)
        return None if fields is None or fields[0] in "ZX" else float(fields[_START_FIELD])
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def describe_process(pid: int) -> str:
    """The kernel's state of a process in words; empty for ordinary ones."""
    fields = _stat(pid)
    return {
        "T": "it is stopped by a signal (SIGSTOP or Ctrl-Z)",
        "t": "it is stopped by a debugger",
        "D": "it waits for a disk or a driver and cannot be interrupted",
        "R": "it is computing",
    }.get(fields[0] if fields else "", "")


def _stat(pid: int) -> list[str] | None:
    """/proc/PID/stat from the state on; the process name before it may contain anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()

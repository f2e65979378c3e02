"""Identify this process for locks and ranks; set its open files and threads; reset it between stages."""

import gc
import os
import random
import resource
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

_START_FIELD = 19  # of /proc/PID/stat, counted from the state: clock ticks since boot


@cache
def this_machine() -> str:
    """Identify kernel and PID namespace (containers may share a host's name): equal for mutually visible PIDs."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return os.uname().nodename


def process_started(pid: int) -> float | None:
    """Start time of a process, for comparison only; None if it is missing or a zombie."""
    if Path("/proc/self/stat").exists():
        fields = _stat(pid)
        return None if fields is None or fields[0] in "ZX" else float(fields[_START_FIELD])
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def describe_process(pid: int) -> str:
    """Describe a process's unusual kernel state; "": none."""
    fields = _stat(pid)
    return {
        "T": "it is stopped by a signal (SIGSTOP or Ctrl-Z)",
        "t": "it is stopped by a debugger",
        "D": "it waits for a disk or a driver and cannot be interrupted",
        "R": "it is computing",
    }.get(fields[0] if fields else "", "")


def is_stopped(pid: int) -> bool:
    """Whether a process answers no signal but SIGKILL until it is told to continue."""
    return (_stat(pid) or [""])[0] in ("T", "t")


def _stat(pid: int) -> list[str] | None:
    """Split /proc/PID/stat from the state on; the process name before it may contain anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


_SHARDS_OPEN = 2 * 128  # `ShardReader`'s limit, for two sets
_OWN = 512  # for Python, libraries, GPUs, MLflow, pipes of worker processes
_OF_A_PEER = 2  # connections to another rank, at most: two process groups


def needed_open_files(*, world_size: int, reading_threads: int) -> int:
    """Bound one rank's open files; `reading_threads` 0: its own thread or worker processes read."""
    return _OWN + _OF_A_PEER * world_size + _SHARDS_OPEN * max(1, reading_threads)


def allow_open_files(needed: int) -> str:
    """Raise the soft limit to `needed`, as far as the hard one allows; return a warning if it falls short."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ""
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if allowed > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        except (OSError, ValueError):  # some systems refuse below their stated limit
            allowed = soft
    if allowed >= needed:
        return ""
    return (
        f"a rank may need {needed:,} open files, and {allowed:,} are allowed (ulimit -Hn): raise the hard limit "
        "(LimitNOFILE of the service that starts it, --ulimit nofile of a container, ulimit -n before sbatch), or "
        "lower data.workers"
    )


WORTH_A_WORD = 0.25  # share of runnable time spent waiting; below 0.05 on an idle machine


def settle_threads(*, cores: float, asked: int | None) -> str:
    """Give torch `asked` threads, else at most `cores`; return a warning if they exceed the cores."""
    import torch

    torch.set_num_threads(asked or max(1, min(torch.get_num_threads(), int(cores))))
    if torch.get_num_threads() <= max(1.0, cores):
        return ""
    return (
        f"OMP_NUM_THREADS is {asked}, but each process has only {cores:.3g} cores here, so that its threads wait for "
        f"one another: set OMP_NUM_THREADS={max(1, int(cores))}, or unset it"
    )


class CoreWaits:
    """Measures how long this process's threads wait for a core, from Linux's scheduler; 0 elsewhere."""

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        self._tasks = tasks
        self._ran, self._waited = self._read()

    def share(self) -> float:
        """Share of the threads' runnable time since the last call spent waiting for a core."""
        ran, waited = self._ran, self._waited
        self._ran, self._waited = self._read()
        ran, waited = max(0, self._ran - ran), max(0, self._waited - waited)  # negative: threads have ended
        return waited / (ran + waited) if waited else 0.0

    def _read(self) -> tuple[int, int]:
        """Nanoseconds."""
        ran = waited = 0
        for file in self._tasks.glob("*/schedstat"):
            with suppress(OSError, ValueError):  # the thread has ended
                own_ran, own_waited, _ = map(int, file.read_text().split())
                ran, waited = ran + own_ran, waited + own_waited
        return ran, waited


class ProcessState:
    """Random state at process start, restored before each later stage."""

    def __init__(self) -> None:
        import torch

        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    def reset(self) -> None:
        """Reset between stages; call once nothing refers to the last stage's engine."""
        import torch

        gc.collect()  # DeepSpeed's engine, its optimizer and its hooks refer to each other
        if "torch._dynamo" in sys.modules:  # the last stage's graphs, and their recompilation count
            torch._dynamo.reset()
        if self._cuda is not None:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.set_rng_state(self._cuda)
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

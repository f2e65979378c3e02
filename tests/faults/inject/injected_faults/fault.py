"""One fault: where, when, what; and doing it."""

import errno
import functools
import json
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Action = Literal["kill", "kill_all", "stop", "sleep", "hold", "raise", "enospc", "eio", "nan", "clock", "signal"]
_HOLD_SECONDS = 240.0  # at most; a test that fails does not let go
SUPERVISOR_PID = "SHARDVIT_SUPERVISOR_PID"


@dataclass
class Fault:
    """One entry of SHARDVIT_FAULT."""

    # kill_all: of the run and `shardvit run`; stop: SIGSTOP; hold: sleep until `release` is there; enospc, eio: OSError
    # of a disk that is full, or failed; nan: the gradient, at point backward; clock: time.time jumps.
    action: Action
    point: str  # of `calls.POINTS` or `files.POINTS`
    rank: int | Literal["any"] = "any"  # the one to strike; "any": the first to come. Without a rank a process is 0
    step: int | None = None  # steps done, at points of the loop; the saved step, at points of a save; None: any
    last_step: int | None = None  # strike at all steps from `step` to this one
    nth: int = 1  # strike from this occasion of the process on
    once: str | None = None  # a marker file: strike only if it is not there, and make it
    trigger: str | None = None  # a file: strike only if it is there, and remove it (for faults in mid-run)
    release: str = ""  # a file that ends a hold
    path: str = ""  # must be in the path of the file, at points of files
    seconds: float = 0.0  # of the sleep, or of the clock's jump
    number: int = signal.SIGTERM  # of the signal
    _occasions: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def is_due(self, *, step: int | None, path: str = "") -> bool:
        """Whether to strike now; counts the occasion, and takes the marker."""
        if self.rank not in ("any", int(os.environ.get("RANK", "0"))):
            return False
        if self.step is not None:
            last = self.step if self.last_step is None else self.last_step
            if step is None or not self.step <= step <= last:
                return False
        if self.path not in path:
            return False
        with self._lock:
            self._occasions += 1
            return self._occasions >= self.nth and self._is_triggered() and self._is_first()

    def strike(self) -> None:
        """Do it."""
        match self.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "kill_all":
                _kill_all()
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "signal":
                os.kill(os.getpid(), self.number)
            case "sleep":
                time.sleep(self.seconds)
            case "hold":
                end = time.monotonic() + _HOLD_SECONDS
                while not os.path.exists(self.release) and time.monotonic() < end:
                    time.sleep(0.02)
            case "raise":
                raise RuntimeError(f"a fault of the tests at {self.point}")
            case "enospc" | "eio":
                number: int = getattr(errno, self.action.upper())
                raise OSError(number, os.strerror(number))
            case "clock":
                now, jump = time.time, self.seconds
                time.time = lambda: now() + jump
            case "nan":
                raise ValueError("the action nan belongs to the point backward")

    def _is_triggered(self) -> bool:
        if self.trigger is None:
            return True
        try:
            os.unlink(self.trigger)
        except FileNotFoundError:
            return False
        return True

    def _is_first(self) -> bool:
        if self.once is None:
            return True
        try:
            os.close(os.open(self.once, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True


@functools.cache
def planned() -> tuple[Fault, ...]:
    """The faults of this process's environment."""
    entries: list[dict[str, Any]] = json.loads(os.environ["SHARDVIT_FAULT"])
    return tuple(Fault(**entry) for entry in entries)


def reach(point: str, *, step: int | None = None, path: str = "") -> None:
    """Execution is at `point`: do what is due."""
    for fault in planned():
        if fault.point == point and fault.is_due(step=step, path=path):
            fault.strike()


def _kill_all() -> None:
    """As a power failure: `shardvit run`, the launcher, every rank and worker, at once; this process last."""
    supervisor = os.environ.get(SUPERVISOR_PID, "")
    if not supervisor:
        raise ValueError(f"kill_all needs {SUPERVISOR_PID}: the process was not started by shardvit run")
    mark, ours = f"{SUPERVISOR_PID}={supervisor}".encode(), {int(supervisor)}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                ours.add(int(folder.name))
        except OSError:  # gone, or somebody else's
            continue
    for pid in sorted(ours - {os.getpid()}, key=lambda pid: pid != int(supervisor)):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os.kill(os.getpid(), signal.SIGKILL)

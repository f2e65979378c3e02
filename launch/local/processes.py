"""Processes of a run on this machine: start ranks, wait for them, find, signal and kill them, explain exit codes.

They are found by a mark in their environment, in one scan of this user's processes. Groups and trees would not do:
torchrun gives each rank its own session, a killed launcher leaves orphans, and on other hosts they are not children.
Launchers report signal n as -n, 256 - n or 128 + n.
"""

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from launch.local.env import RENDEZVOUS, SUPERVISOR_PID, without_place
from pipeline.recipe.vocabulary import EXIT_STOPPED, EXIT_USER_ERROR

RANK_COMMAND = ["-u", "-m", "launch.train"]
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# For the other ranks after the first one's end: rank 0 may still be telling MLflow the rest; after a failure they
# notice within seconds, unless they hang in a collective.
_FOLLOW_SECONDS, _FOLLOW_FAILED_SECONDS = 300.0, 30.0
_POLL_SECONDS = 0.05
_KILL_SECONDS = 30.0  # a process that waits for a broken disk dies later
_LEAST_SCANS = 100  # even after that time, which may have passed while this process itself was paused
_SCAN_SECONDS = 0.02
_JOIN_SECONDS = 0.05
_HINTS: dict[int, str] = {
    signal.SIGBUS: ", as happens when /dev/shm is too small or a disk filled up under an open file",
    signal.SIGSEGV: ", a crash inside a library",
    signal.SIGABRT: ", a library gave up: its message is above",
}

Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


@contextmanager
def handled(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    """Send these signals to `handler`, in the main thread; a SIGHUP that nohup ignores stays ignored."""
    numbers = [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, earlier in zip(numbers, before, strict=True):
            signal.signal(number, earlier)


def rank_environment(rank: int, *, ranks: int, rendezvous: Path) -> dict[str, str]:
    """Environment of one rank on this machine, without the ranks of a launcher or batch script around us."""
    return without_place() | place_here(rank, ranks=ranks, rendezvous=rendezvous)


def place_here(rank: int, *, ranks: int, rendezvous: Path) -> dict[str, str]:
    """Variables of a rank's place when all ranks are on this machine."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, RENDEZVOUS: rendezvous}
    return {name: str(value) for name, value in place.items()}


def run_ranks(
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    *,
    on_stop: Callable[[], None] = lambda: None,
) -> tuple[int, bool]:
    """Run Python processes to their end, each in its own session and environment, marked as this one's.

    SIGINT, SIGTERM, SIGHUP and SIGUSR1 make them save and leave (SIGTERM), as does the failure of one. Those that
    outlive the first one by too long are killed with everything they started. `on_stop` is called at the first signal.
    Returns the most telling exit code (negative: killed by a signal), and whether a stop was requested; raises
    KeyboardInterrupt at a second Ctrl-C, which kills them.
    """
    mark = (SUPERVISOR_PID, str(os.getpid()))
    received: list[int] = []  # handled by the loop, once all ranks are started
    ranks: list[subprocess.Popen[bytes]] = []
    with handled(STOP_SIGNALS, lambda number, frame: received.append(number)):
        try:
            for environment in environments:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, *arguments],
                        env={**environment, mark[0]: mark[1]},
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )
            code = _stand_by(ranks, received=received, on_stop=on_stop)
        finally:
            kill_all(*mark)  # what a rank has started outlives it when it is killed
            for rank in ranks:
                rank.wait()
    if not code and not received:
        code = _overall(ranks)  # shows a rank that had to be killed; after a requested stop that does not count
    return code, bool(received)


def _stand_by(ranks: Sequence[subprocess.Popen[bytes]], *, received: list[int], on_stop: Callable[[], None]) -> int:
    """Wait until all have ended or the rest must be killed; returns the most telling code so far."""
    seen = 0  # of `received`
    first: int | None = None
    kill_at = math.inf
    while None in [rank.poll() for rank in ranks] and time.monotonic() < kill_at:
        if seen < len(received):
            seen += 1
            if seen == 1:
                on_stop()
                _terminate(ranks)
            elif received[:seen].count(signal.SIGINT) > 1:  # batch systems repeat signals; only Ctrl-C is impatience
                raise KeyboardInterrupt
        elif first is None and any(rank.returncode is not None for rank in ranks):
            first = _overall(ranks, stop_was_asked=bool(seen))
            in_order = first in (0, EXIT_STOPPED)
            kill_at = time.monotonic() + (_FOLLOW_SECONDS if in_order else _FOLLOW_FAILED_SECONDS)
            if not in_order:
                _terminate(ranks)
        else:
            time.sleep(_POLL_SECONDS)
    return _overall(ranks, stop_was_asked=bool(seen)) if seen or not first else first


def _overall(ranks: Sequence[subprocess.Popen[bytes]], *, stop_was_asked: bool = False) -> int:
    """Combine the codes so far; 1 comes last, as ranks that notice another one's end also end with it."""
    codes = [rank.returncode for rank in ranks if rank.returncode is not None]
    return overall_code(sorted(codes, key=lambda code: code == 1), stop_was_asked=stop_was_asked)


def _terminate(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.terminate()  # does nothing to one that has ended


def marked(name: str, value: str) -> list[psutil.Process]:
    """Find all processes but this one whose environment variable `name` is `value`."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # gone, or another user's
            if process.pid != os.getpid() and process.environ().get(name) == value:
                found.append(process)
    return found


def marked_ranks(name: str, value: str) -> list[psutil.Process]:
    """Filter `marked` for the processes that train."""
    found = []
    for process in marked(name, value):
        with suppress(psutil.Error):
            if process.cmdline()[1:4] == RANK_COMMAND:
                found.append(process)
    return found


def kill_all(name: str, value: str) -> None:
    """Kill all marked processes and what they start meanwhile."""
    deadline, scans = time.monotonic() + _KILL_SECONDS, 0
    while (alive := marked(name, value)) and (scans < _LEAST_SCANS or time.monotonic() < deadline):
        scans += 1
        for process in alive:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(_SCAN_SECONDS)


def join_thread(thread: threading.Thread, *, seconds: float) -> None:
    """Wait for a thread in short turns, so that a pause of this process costs only one."""
    for _ in range(round(seconds / _JOIN_SECONDS)):
        thread.join(_JOIN_SECONDS)
        if not thread.is_alive():
            return


def signal_of(code: int) -> int:
    """Return the signal that an exit code stands for; 0: none."""
    return -code if code < 0 else 256 - code if code > 192 else code - 128 if code > 128 else 0


def overall_code(codes: Sequence[int], *, stop_was_asked: bool) -> int:
    """Combine exit codes, given in the order of ending: a user's mistake or a requested stop wins, then the first that
    is not 0."""
    winners = [EXIT_USER_ERROR, *([EXIT_STOPPED] if stop_was_asked else [])]
    return next((code for code in [*(each for each in winners if each in codes), *codes] if code), 0)


def reason(code: int, *, out_of_memory: bool | None) -> str:
    """Explain why a stage is not done; `out_of_memory`: the kernel killed a process for that (None: unknown)."""
    number = signal_of(code)
    if code == EXIT_STOPPED:
        return "stopped and saved"
    if code == 0:  # deepspeed's code even if its own watching process failed
        return "its launcher was killed"
    if number == signal.SIGKILL:
        if out_of_memory:
            return "the kernel killed a process because memory ran out"
        hint = ", which is what the kernel does when memory runs out" if out_of_memory is None else ""
        return f"a process was killed by signal 9{hint}"
    if number:
        return f"a process was ended by signal {number} ({signal_name(number)}){_HINTS.get(number, '')}"
    return f"exit code {code}"


def memory_kills(root: Path = Path("/")) -> int | None:
    """Count the kernel's out-of-memory kills so far, in this cgroup or else this machine; None: unknown. Reads three
    small files."""
    try:
        groups = dict(line.split(":", 2)[1:] for line in (root / "proc/self/cgroup").read_text().splitlines())
    except (OSError, ValueError):
        groups = {}
    counts = [root / "proc/vmstat"]
    if "" in groups:
        counts.insert(0, root / "sys/fs/cgroup" / groups[""].strip("/") / "memory.events")
    if "memory" in groups:
        counts.insert(0, root / "sys/fs/cgroup/memory" / groups["memory"].strip("/") / "memory.oom_control")
    for path in counts:
        try:
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return None


def signal_name(number: int) -> str:
    """Name a signal, such as SIGSEGV."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return "without a name"

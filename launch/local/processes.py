"""Start ranks on this machine, wait for them, find, signal and kill them, explain exit codes.

Processes are found by a mark in their environment. Process groups and trees do not suffice: torchrun gives each rank
its own session, and a killed launcher leaves orphans. Launchers report signal n as -n, 256 - n or 128 + n.
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

from shardvit.data_shards.working_folder import SAFE_PATH
from shardvit.launch.local.env import RENDEZVOUS, SUPERVISOR_PID, without_place
from shardvit.launch.local.forked import Child
from shardvit.launch.local.nursery import RANK_MODULE, Nursery
from shardvit.pipeline.recipe.vocabulary import EXIT_STOPPED, EXIT_USER_ERROR

RANK_COMMAND = ["-u", "-m", RANK_MODULE]
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# Granted to the other ranks after the first exits: rank 0 may still be sending to MLflow; after a failure they notice
# within seconds, unless they hang in a collective.
_FOLLOW_SECONDS, _FOLLOW_FAILED_SECONDS = 300.0, 30.0
_POLL_SECONDS = 0.05
_KILL_SECONDS = 30.0  # give up on a process stuck in disk I/O
_LEAST_SCANS = 100  # even past the deadline, in case this process itself was paused
_SCAN_SECONDS = 0.02
_JOIN_SECONDS = 0.05
_HINTS: dict[int, str] = {
    signal.SIGBUS: ", as happens when /dev/shm is too small or a disk filled up under an open file",
    signal.SIGSEGV: ", a crash inside a library",
    signal.SIGABRT: ", a library gave up: its message is above",
}

Process = subprocess.Popen[bytes] | Child
Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


@contextmanager
def handled(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    """Handle these signals within the block, in the main thread (others cannot: their process keeps its handlers); a
    SIGHUP that nohup ignores stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        numbers = ()
    numbers = [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, earlier in zip(numbers, before, strict=True):
            signal.signal(number, earlier)


def rank_environment(rank: int, *, ranks: int, rendezvous: Path) -> dict[str, str]:
    """Return one rank's environment on this machine, without variables of an outer launcher or batch script."""
    return without_place() | place_here(rank, ranks=ranks, rendezvous=rendezvous)


def place_here(rank: int, *, ranks: int, rendezvous: Path) -> dict[str, str]:
    """Return the launcher variables of a rank when all ranks are on this machine."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, RENDEZVOUS: rendezvous}
    return {name: str(value) for name, value in place.items()}


def run_ranks(
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    *,
    nursery: Nursery | None = None,
    on_stop: Callable[[], None] = lambda: None,
) -> tuple[int, bool]:
    """Run Python processes, each in its own session, marked as this process's. Returns the most informative exit code
    (negative: killed by a signal) and whether a stop was requested.

    On SIGINT, SIGTERM, SIGHUP, SIGUSR1 or the failure of one, all get SIGTERM, and save and exit. Those that outlive
    the first for too long are killed with their descendants. A second Ctrl-C kills all and raises KeyboardInterrupt.
    With a nursery `arguments` are of RANK_COMMAND; if that has died, processes are started as without.
    """
    mark = (SUPERVISOR_PID, str(os.getpid()))
    received: list[int] = []  # handled in the loop once all ranks have started
    ranks: list[Process] = []
    with handled(STOP_SIGNALS, lambda number, frame: received.append(number)):
        try:
            for environment in environments:
                environment = {**SAFE_PATH, **environment, mark[0]: mark[1]}
                if nursery is not None:
                    with suppress(OSError):
                        ranks.append(nursery.start(arguments[len(RANK_COMMAND) :], environment))
                        continue
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, *arguments],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )
            code = _stand_by(ranks, received=received, on_stop=on_stop)
        finally:
            kill_all(*mark)  # a killed rank leaves its children
            for rank in ranks:
                rank.wait()
    if not code and not received:
        code = _overall(ranks)  # includes ranks that had to be killed, which is fine after a requested stop
    return code, bool(received)


def _stand_by(ranks: Sequence[Process], *, received: list[int], on_stop: Callable[[], None]) -> int:
    """Wait until all have exited or the rest must be killed; returns the most informative code so far."""
    seen = 0  # of `received`
    first: int | None = None
    kill_at = math.inf
    while None in [rank.poll() for rank in ranks] and time.monotonic() < kill_at:
        if seen < len(received):
            seen += 1
            if seen == 1:
                on_stop()
                _terminate(ranks)
            elif received[:seen].count(signal.SIGINT) > 1:  # batch systems repeat signals; only Ctrl-C means it
                raise KeyboardInterrupt
        elif first is None and any(rank.returncode is not None for rank in ranks):
            first = _overall(ranks, stop_was_asked=bool(seen))
            in_order = first in (0, EXIT_STOPPED)
            kill_at = time.monotonic() + (_FOLLOW_SECONDS if in_order else _FOLLOW_FAILED_SECONDS)
            if not in_order and not seen:  # a second SIGTERM would kill a rank that is on its way out
                _terminate(ranks)
        else:
            time.sleep(_POLL_SECONDS)
    return _overall(ranks, stop_was_asked=bool(seen)) if seen or not first else first


def _overall(ranks: Sequence[Process], *, stop_was_asked: bool = False) -> int:
    """Combine the codes so far; 1 comes last, as it is also the code of ranks that noticed another's end."""
    codes = [rank.returncode for rank in ranks if rank.returncode is not None]
    return overall_code(sorted(codes, key=lambda code: code == 1), stop_was_asked=stop_was_asked)


def _terminate(ranks: Sequence[Process]) -> None:
    for rank in ranks:
        rank.terminate()  # no-op if already exited


def marked(name: str, value: str) -> list[psutil.Process]:
    """Find all other processes whose environment variable `name` is `value`."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # gone, or another user's
            if process.pid != os.getpid() and process.environ().get(name) == value:
                found.append(process)
    return found


def marked_ranks(name: str, value: str) -> list[psutil.Process]:
    """Find the marked processes that are ranks."""
    found = []
    for process in marked(name, value):
        with suppress(psutil.Error):
            if process.cmdline()[1:4] == RANK_COMMAND:
                found.append(process)
    return found


def kill_all(name: str, value: str) -> None:
    """Kill all marked processes, rescanning for new children."""
    deadline, scans = time.monotonic() + _KILL_SECONDS, 0
    while (alive := marked(name, value)) and (scans < _LEAST_SCANS or time.monotonic() < deadline):
        scans += 1
        for process in alive:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(_SCAN_SECONDS)


def join_thread(thread: threading.Thread, *, seconds: float) -> None:
    """Join a thread in short turns, so that a pause of this process uses up only one."""
    for _ in range(round(seconds / _JOIN_SECONDS)):
        thread.join(_JOIN_SECONDS)
        if not thread.is_alive():
            return


def signal_of(code: int) -> int:
    """Decode the signal from an exit code; 0: none."""
    return -code if code < 0 else 256 - code if code > 192 else code - 128 if code > 128 else 0


def overall_code(codes: Sequence[int], *, stop_was_asked: bool) -> int:
    """Combine exit codes, in order of exit: a user error or requested stop wins, then the first nonzero one."""
    winners = [EXIT_USER_ERROR, *([EXIT_STOPPED] if stop_was_asked else [])]
    return next((code for code in [*(each for each in winners if each in codes), *codes] if code), 0)


def reason(code: int, *, out_of_memory: bool | None) -> str:
    """Explain why a stage is not done; `out_of_memory`: the kernel's OOM killer struck (None: unknown)."""
    number = signal_of(code)
    if code == EXIT_STOPPED:
        return "stopped and saved"
    if code == 0:  # deepspeed's code even if its monitor process failed
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
    """Count OOM kills so far in this cgroup, else on this machine; None: unknown. Reads up to three small files."""
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
    """Return a signal's name, such as SIGSEGV."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return "without a name"

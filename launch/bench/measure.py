"""Measuring what processes cost: CPU time of a process tree, its memory, and methods taken in turns.

CPU time rather than wall time, because a shared machine steals the latter; methods in turns, because it slows down and
speeds up within seconds, and then all methods alike. Reading the memory of a tree costs a few milliseconds, twice a
second. Linux only: elsewhere there is no proportional set size.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psutil

Item = TypeVar("Item")

_SAMPLE_SECONDS = 0.5  # between two looks at the memory
_LEAVE_SECONDS = 5.0  # in which a measured process may end by itself, once it has told everything
_TURN_ITEMS = 20  # of one method, before the next has its turn on the same items
_WORDS_LENGTH = 300
_MIB = 2**20


@dataclass(frozen=True)
class Memory:
    """Memory of a process tree at one moment."""

    pss_mib: float  # proportional set size: pages shared by n processes count 1/n for each
    processes: int


@dataclass(frozen=True)
class Told:
    """Marks that a measured process told, and what was seen of it from outside."""

    marks: Mapping[str, Mapping[str, Any]]  # name of the mark -> its values, with "seconds" since the start
    peak_pss_mib: float
    processes: int  # the most at the same time
    failure: str | None  # why it did not tell everything; None: it did


def tree(root: psutil.Process) -> list[psutil.Process]:
    """A process and all below it."""
    return [root, *root.children(recursive=True)]


def tree_cpu_seconds(root: psutil.Process) -> float:
    """CPU time, user and system, of a process tree so far; children that have ended and were waited for count."""
    total = 0.0
    for process in tree(root):
        with contextlib.suppress(psutil.NoSuchProcess):  # ended between the two looks; its parent has its time now
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def tree_memory(root: psutil.Process) -> Memory:
    """Memory of a process tree now."""
    pss_bytes, processes = 0, 0
    for process in tree(root):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            pss_bytes += process.memory_full_info().pss
            processes += 1
    return Memory(pss_mib=pss_bytes / _MIB, processes=processes)


class Teller:
    """Tell the measuring process where the measured one stands.

    Args:
        descriptor: the pipe that it was given.
    """

    def __init__(self, descriptor: int) -> None:
        self._stream = os.fdopen(descriptor, "w", encoding="utf-8")

    def mark(self, name: str, **values: Any) -> None:
        """Tell that a point is reached, with the time and any values that JSON can hold."""
        self._stream.write(json.dumps({"mark": name, "at": time.monotonic(), **values}) + "\n")
        self._stream.flush()


def run_told(
    command: Callable[[int], Sequence[str]], *, last_mark: str, env: Mapping[str, str], timeout_seconds: float
) -> Told:
    """Start a process that tells its marks, watch it until the last one, and end it with all its children.

    Args:
        command: given the descriptor of the pipe to tell through, the command line.
        last_mark: when it is told the measurement is over.
        env: the whole environment of the process.
        timeout_seconds: after which it has failed.
    """
    reading, writing = os.pipe()
    marks: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as output, os.fdopen(reading) as stream:
        start = time.monotonic()
        process = subprocess.Popen(
            list(command(writing)),
            env=dict(env),
            pass_fds=(writing,),
            stdin=subprocess.PIPE,  # closed when it has been looked at for the last time
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(writing)
        try:
            with _Watch(process.pid) as watch:
                clock = threading.Timer(timeout_seconds, _kill_session, args=(process.pid,))
                clock.start()
                for line in stream:
                    told = json.loads(line)
                    told["seconds"] = told.pop("at") - start
                    marks[told.pop("mark")] = told
                    if last_mark in marks:
                        break
                else:
                    process.wait()  # on its way out with an exit code of its own; the clock ends it if it hangs there
                clock.cancel()
        finally:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LEAVE_SECONDS)
            _kill_session(process.pid)
            process.wait()
        failure = None if last_mark in marks else _last_words(output, process.returncode)
    return Told(marks=marks, peak_pss_mib=watch.peak_pss_mib, processes=watch.processes, failure=failure)


def in_turns(
    methods: Mapping[str, Callable[[Item], object]], items: Sequence[Item], *, rounds: int
) -> dict[str, list[float]]:
    """CPU seconds per item of several methods in this process, each round over all items.

    A few items go through one method, then the same ones through the next: a change of the machine's speed hits all.
    """
    spent: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for costs in spent.values():
            costs.append(0.0)
        for first in range(0, len(items), _TURN_ITEMS):
            turn = items[first : first + _TURN_ITEMS]
            for name, method in methods.items():
                before = time.process_time()
                for item in turn:
                    method(item)
                spent[name][-1] += (time.process_time() - before) / len(items)
    return spent


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median over rounds of the ratio within a round: what the machine did in that round cancels."""
    return statistics.median(over / under for over, under in zip(numerators, denominators, strict=True))


@dataclass
class _Watch:
    """Looks at a process tree from a thread, as long as it is entered."""

    pid: int
    peak_pss_mib: float = 0.0
    processes: int = 0
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> _Watch:
        self._thread = threading.Thread(target=self._keep_looking, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        assert self._thread is not None
        self._thread.join()
        self._look()  # once at least, however short it was

    def _keep_looking(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            self._look()

    def _look(self) -> None:
        with contextlib.suppress(psutil.Error):
            now = tree_memory(psutil.Process(self.pid))
            self.peak_pss_mib = max(self.peak_pss_mib, now.pss_mib)
            self.processes = max(self.processes, now.processes)


def _kill_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _last_words(output: Any, returncode: int) -> str:
    """The last exception that a process printed, or its last line."""
    output.seek(0)
    lines = [line.strip() for line in output.read().splitlines() if line.strip()] or ["it said nothing"]
    errors = [number for number, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    said = " ".join(lines[errors[-1] :] if errors else lines[-1:])
    return f"exit code {returncode}: {said[:_WORDS_LENGTH]}"

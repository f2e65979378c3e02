"""Measure processes: CPU time and memory of a process tree, and methods in turns. Linux only (proportional set size).

CPU time rather than wall time, which other programs on a shared machine affect. Methods take turns, because the
machine's speed changes within seconds. Reading a tree's memory costs a few milliseconds, twice a second.
"""

import contextlib
import json
import os
import platform
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import psutil

from shardvit.launch.local.env import without_place
from shardvit.pipeline.runs.written_by import revision

Item = TypeVar("Item")

_SAMPLE_SECONDS = 0.5  # between memory samples
_LEAVE_SECONDS = 5.0  # for a measured process to exit after its last mark
_TURN_ITEMS = 20  # per method, before the next one gets the same items
_MOST_CHARACTERS = 400  # of a failure message
_MIB = 2**20
_ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Memory:
    """Memory of a process tree."""

    pss_mib: float = 0.0  # proportional set size: a page shared by n processes counts 1/n for each
    processes: int = 0


@dataclass(frozen=True)
class Told:
    """Marks of a measured process, and its tree's memory from outside."""

    marks: Mapping[str, Mapping[str, Any]]  # name -> values, with "seconds" since the start
    peak: Memory
    failure: str | None  # why the last mark is missing


def tree_cpu_seconds(root: psutil.Process) -> float:
    """User and system CPU time of a process tree so far, including ended children that were waited for."""
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # just ended; its parent now has its time
            total += sum(process.cpu_times()[:4])  # user, system, and both of its children
    return total


def tree_memory(root: psutil.Process) -> Memory:
    """Current memory of a process tree."""
    found = Memory()
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            found.pss_mib += process.memory_full_info().pss / _MIB
            found.processes += 1
    return found


class Teller:
    """Write a measured process's marks to the pipe `descriptor`."""

    def __init__(self, descriptor: int) -> None:
        self._stream = os.fdopen(descriptor, "w", encoding="utf-8")

    def mark(self, name: str, **values: Any) -> None:
        self._stream.write(json.dumps({"mark": name, "at": time.monotonic(), **values}) + "\n")
        self._stream.flush()


def run_told(
    command: Callable[[int], Sequence[str]],
    *,
    env: Mapping[str, str],
    timeout_seconds: float,
    last_mark: str = "end",
    samples_memory: bool = True,
) -> Told:
    """Start a process by `command` (from the descriptor of the pipe for its marks), read its marks until the last one,
    and end it with all its children."""
    reading, writing = os.pipe()
    marks: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as output, os.fdopen(reading) as stream:
        start = time.monotonic()
        process = subprocess.Popen(
            list(command(writing)),
            env=dict(env),
            pass_fds=(writing,),
            stdin=subprocess.PIPE,  # closed after the last memory sample
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(writing)
        clock = threading.Timer(timeout_seconds, _kill_session, args=(process.pid,))
        try:
            with _sampled(process.pid) if samples_memory else contextlib.nullcontext(Memory()) as peak:
                clock.start()
                for line in stream:
                    told = json.loads(line)
                    told["seconds"] = told.pop("at") - start
                    marks[told.pop("mark")] = told
                    if last_mark in marks:
                        break
                else:
                    process.wait()  # for its exit code; the timer kills it if it hangs
        finally:
            is_late = time.monotonic() - start >= timeout_seconds
            clock.cancel()
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LEAVE_SECONDS)
            _kill_session(process.pid)
            process.wait()
        failure = None
        if last_mark not in marks:
            failure = f"ended after {timeout_seconds:.3g} s" if is_late else _last_words(output, process.returncode)
    return Told(marks, peak, failure)


def child_environment(*, temporary: Path) -> dict[str, str]:
    """Environment of a measured process: no launcher's variables, no GPU, what it leaves behind in `temporary`."""
    environment = without_place()
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])]),
        "CUDA_VISIBLE_DEVICES": "",
        "TMPDIR": str(temporary),
    }


def run_json(
    module: str, *arguments: str, env: Mapping[str, str] | None = None, timeout_seconds: float | None = None
) -> Any:
    """Run a module in a fresh process and parse its last output line; RuntimeError with its output if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=env, capture_output=True, text=True, timeout=timeout_seconds
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def in_turns(
    methods: Mapping[str, Callable[[Item], object]], items: Sequence[Item], *, rounds: int
) -> dict[str, list[float]]:
    """CPU seconds per item of each method in this process, by rounds. Methods take turns on a few items at a time, so
    that changes of the machine's speed hit all alike."""
    spent: dict[str, list[float]] = {name: [0.0] * rounds for name in methods}
    for number in range(rounds):
        for first in range(0, len(items), _TURN_ITEMS):
            turn = items[first : first + _TURN_ITEMS]
            for name, method in methods.items():
                before = time.process_time()
                for item in turn:
                    method(item)
                spent[name][number] += (time.process_time() - before) / len(items)
    return spent


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median over rounds of the ratio within a round, where the machine's speed cancels."""
    return statistics.median(over / under for over, under in zip(numerators, denominators, strict=True))


def children_cpu_seconds() -> float:
    """CPU time of this process's ended children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def setting(*libraries: str) -> str:
    """Describe Python, these libraries and the processor, for the first line of a record."""
    versions = "".join(f", {name} {version(name)}" for name in libraries)
    return f"Python {platform.python_version()}{versions}, {os.cpu_count()} cores ({processor()})"


def heading(*libraries: str) -> str:
    """The first line of a record: commit, date, versions, machine."""
    commit, *changes = revision().split(" ", maxsplit=1)
    return f"{' '.join(['commit', commit[:12], *changes])}, {time.strftime('%Y-%m-%d')}, {setting(*libraries)}"


def processor() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


@contextlib.contextmanager
def _sampled(pid: int) -> Iterator[Memory]:
    """Sample a process tree from a thread; yields the peaks, complete on exit."""
    peak, is_over = Memory(), threading.Event()

    def sample() -> None:
        with contextlib.suppress(psutil.Error):
            now = tree_memory(psutil.Process(pid))
            peak.pss_mib = max(peak.pss_mib, now.pss_mib)
            peak.processes = max(peak.processes, now.processes)

    def keep_sampling() -> None:
        while not is_over.wait(_SAMPLE_SECONDS):
            sample()

    thread = threading.Thread(target=keep_sampling, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()
        sample()  # at least once, however short it was


def _kill_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _last_words(output: Any, returncode: int) -> str:
    """The last exception that a process printed, else its last line."""
    output.seek(0)
    lines = [line.strip() for line in output.read().splitlines() if line.strip()] or ["it printed nothing"]
    errors = [number for number, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    said = " ".join(lines[errors[-1] :] if errors else lines[-1:])
    return f"exit code {returncode}: {said[:_MOST_CHARACTERS]}"

"""Run tests in processes of their own, so that whatever ends one costs a single line: `lines_of`.

A process ends at its first failure, and the next one takes the rest: a CUDA error spoils whatever follows it in the
same process. After `_PATIENCE` failures in a row it goes on by itself, since starting takes seconds. A line that is
silent for too long is asked for its stacks (SIGABRT, which pytest's faulthandler answers) and killed. After a hang the
next lines get a quarter of that time; after a second one the group ends, so that other groups have theirs.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from shardvit.launch.bench.acceptance_report import AcceptanceLine, Part

ROOT = Path(__file__).resolve().parents[2]
_PATIENCE = 3
_POLL_SECONDS, _STACKS_SECONDS = 0.2, 10.0
_MOST_DETAILS = 12_000  # characters
OVER = "the time was over"
_HANG, _MOST_HANGS = "hang", 2
_START_SECONDS = 60.0  # of a process, at most


@dataclass(frozen=True)
class LineGroup:
    """Tests that share processes."""

    part: Part
    title: str
    paths: tuple[str, ...]  # below `root`
    options: tuple[str, ...] = ("-m", "gpu")
    root: Path = ROOT


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    why: str  # "": by itself, after tests that passed or failed, or without any to run
    output: str

    @property
    def details(self) -> str:
        return self.output[-_MOST_DETAILS:]


def lines_of(
    group: LineGroup,
    *,
    device: str,
    environment: Mapping[str, str],
    line_seconds: float,
    deadline: float = math.inf,
    without: Sequence[str] = (),
) -> Iterator[AcceptanceLine]:
    """Run the group's tests but `without`; yields each line as it ends. `deadline` is of the monotonic clock."""
    todo, failures, hangs, known = [*group.paths], 0, 0, set[str]()
    skipped = [option for test in without for option in ("--deselect", test)]
    while todo:
        selected, running, since, progress, ended = None, None, time.monotonic(), False, Ended("", "")
        command = [
            *_pytest(group, device=device),
            *skipped,
            *(["--one-failure"] if failures < _PATIENCE else []),
            *todo,
        ]
        for event in _events(
            command,
            root=group.root,
            environment=environment,
            silent_seconds=min(line_seconds, max(line_seconds / 4, _START_SECONDS)) if hangs else line_seconds,
            deadline=deadline,
        ):
            if isinstance(event, Ended):
                ended = event
            elif event["event"] == "selected":
                selected = event["tests"]
            elif event["event"] == "start":
                running, since = event["test"], time.monotonic()
            else:
                running, progress, seconds = None, True, time.monotonic() - since
                values = {key: event.get(key, "") for key in ("status", "reason", "shown", "details")}
                yield AcceptanceLine(group.part, group.title, event["test"], seconds=seconds, **values)
                failures = failures + 1 if values["status"] == "fail" else 0
                known.add(event["test"])
        is_over = ended.why == OVER
        if running is not None:
            seconds = time.monotonic() - since
            what: Any = {"status": "not run"} if is_over else {"status": "fail", "details": ended.details}
            yield AcceptanceLine(group.part, group.title, running, reason=ended.why, seconds=seconds, **what)
            progress, failures = True, failures + 1
            known.add(running)
        todo = [test for test in (todo if selected is None else selected) if test not in known]
        hangs += ended.why.startswith(_HANG)
        if is_over or not progress or hangs == _MOST_HANGS:
            what = {"status": "not run", "reason": OVER if is_over else f"{hangs} earlier lines hung"}
            if not progress and not is_over:
                what = {"status": "fail", "reason": ended.why or "pytest did not begin", "details": ended.details}
            yield from (AcceptanceLine(group.part, group.title, test, **what) for test in todo)
            return


def _pytest(group: LineGroup, *, device: str) -> list[str]:
    plugin = ["-p", "shardvit.launch.bench.acceptance_lines"]
    # Warnings of other versions are no failures here, nor are settings of plugins that are not installed.
    lenient = ["-o", "addopts=--import-mode=importlib", "-W", "default", "-p", "no:cacheprovider", "-q"]
    lenient.append("--continue-on-collection-errors")
    return [
        sys.executable,
        "-m",
        "pytest",
        "--rootdir",
        str(group.root),
        *plugin,
        *lenient,
        "--device",
        device,
        *group.options,
    ]


def _events(
    command: Sequence[str], *, root: Path, environment: Mapping[str, str], silent_seconds: float, deadline: float
) -> Iterator[Any]:
    """What the process's plugin writes, as it does so, and at last `Ended`."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        file = Path(folder) / "lines"
        file.touch()
        process = subprocess.Popen(
            [*command, "--lines", str(file)],
            cwd=root,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        heard, why, line = time.monotonic(), "", ""
        try:
            with file.open(encoding="utf-8") as stream:
                while True:
                    has_ended = process.poll() is not None
                    while part := stream.readline():
                        line += part
                        if line.endswith("\n"):
                            heard, event, line = time.monotonic(), json.loads(line), ""
                            yield event
                    if has_ended:
                        break
                    if time.monotonic() > min(deadline, heard + silent_seconds):
                        is_over = time.monotonic() > deadline
                        why = OVER if is_over else f"{_HANG}: no end after {silent_seconds:.0f} s"
                        stop(process, asks=not is_over)
                        break
                    time.sleep(_POLL_SECONDS)
        finally:
            stop(process, asks=False)
        output.seek(0)
        yield Ended(why or _how(process.returncode), output.read().decode("utf-8", errors="replace"))


def _how(returncode: int) -> str:
    if returncode < 0:
        return f"crash: {signal.Signals(-returncode).name}"
    return "" if returncode in (0, 1, 5) else f"the process ended with exit code {returncode}"


def stop(process: subprocess.Popen[bytes], *, asks: bool) -> None:
    """Kill the process with all below it, sessions of their own included."""
    if process.poll() is not None:
        return
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    if asks:
        process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STACKS_SECONDS)
    for each in tree:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def environment_for(device: str) -> dict[str, str]:
    """The environment of all processes."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    hidden = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if device == "cpu" else {}
    return {**os.environ, "PYTHONPATH": paths, "PYTEST_ADDOPTS": "", **hidden}

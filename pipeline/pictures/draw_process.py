"""The process that draws beside rank 0: it takes no GPU, no lock and, at the lowest priority, no time from training.

    Beside.ask("pretrain", "begin", step=0)   ->   one line of JSON to its standard input   ->   `drawing.draw`

After each stage it also writes the run's page, and sends MLflow what that lacks of all this.

It is started at the first request and ends when rank 0 does; a request that it cannot take at once is dropped, since
`shardvit report` draws what is missing. Of several evaluations that wait only the last is drawn. What it has to say
goes to RUN/pictures.log.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, get_args

import psutil

from data_shards.durable import break_links
from data_shards.text import parse_json, printable
from pipeline.recipe.vocabulary import PICTURES_LOG, StageName
from pipeline.runs.pictures import Moment
from pipeline.runs.run_folder import RunFolder

_SILENT_SECONDS = 2.0  # of the wait at the end pass before it is said
_POLL_SECONDS = 0.1
_LOWEST_PRIORITY = 19


@dataclass(frozen=True)
class _Asked:
    """A request as it is sent."""

    stage: StageName
    moment: Moment
    step: int


class Beside(AbstractContextManager["Beside"]):
    """Rank 0's side of the drawing process.

    Args:
        folder: of the run.
        environ: the process's environment, without a launcher's ranks.
        module: what the process runs (`python -m`); it calls `main`.
        moments: what else is asked for is passed over.
        say: prints a line.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        environ: Mapping[str, str],
        say: Callable[[str], None],
        module: str,
        moments: Sequence[Moment] = get_args(Moment),
    ) -> None:
        self._folder, self._environ, self._say, self._moments = folder, environ, say, moments
        self._module = module
        self._child: subprocess.Popen[bytes] | None = None
        self._failed = False

    def ask(self, stage: StageName, moment: Moment, step: int) -> None:
        """Have that moment of a stage drawn; returns at once, whatever becomes of it."""
        if moment not in self._moments:
            return
        try:
            child = self._child = self._child or self._start()
            assert child.stdin is not None
            line = json.dumps(asdict(_Asked(stage, moment, step))).encode() + b"\n"
            if child.stdin.write(line) is None:  # so short a line is written whole or not at all
                raise BlockingIOError(errno.EAGAIN, "too many requests wait")
        except OSError as error:  # no memory for a process, it ended, or its pipe is full
            if not self._failed:
                self._failed = True
                self._say(f"no pictures for now ({error}): shardvit report draws them")

    def cpu_seconds(self) -> float:
        """CPU time of the process so far; 0 before it starts and after it ends."""
        try:
            return 0.0 if self._child is None else sum(psutil.Process(self._child.pid).cpu_times()[:2])
        except psutil.Error:  # it has ended
            return 0.0

    def close(self, *, patience_seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Wait so long, or until `hurry`, for what was asked for, then end the process. Closing twice is harmless."""
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None
        with suppress(OSError):
            child.stdin.close()
        begun, told = time.monotonic(), False
        while child.poll() is None and not hurry() and (spent := time.monotonic() - begun) < patience_seconds:
            if spent > _SILENT_SECONDS and not told:
                told = True
                self._say(f"waiting for pictures and MLflow, {patience_seconds:g} s at most")
            time.sleep(_POLL_SECONDS)
        if child.poll() is None:
            child.kill()
            child.wait()
            self._say(f"some pictures are not drawn yet: shardvit report {self._folder.path} draws them")

    def __exit__(self, *_: object) -> None:
        self.close(patience_seconds=0.0)

    def _start(self) -> subprocess.Popen[bytes]:
        break_links(self._folder.path / PICTURES_LOG)
        with open(self._folder.path / PICTURES_LOG, "ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", self._module, str(self._folder.runs_root), self._folder.name],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                bufsize=0,
                env={**self._environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            )
        assert child.stdin is not None
        os.set_blocking(child.stdin.fileno(), False)
        return child


# From here on: the process itself.


def main(runs_root: str, name: str, *, write_page: Callable[[RunFolder], object]) -> None:
    """Draw what is asked for on standard input until it ends, and write the run's page at the end of each stage."""
    os.nice(_LOWEST_PRIORITY)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's to answer, whose end ends this
    folder = RunFolder(runs_root=Path(runs_root), name=name)
    lines: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, lines), daemon=True).start()
    from pipeline.pictures.drawing import draw, request_of
    from pipeline.tracking.publish import publish_page, publish_stage

    while pending := _pending(lines):
        for asked in pending:
            try:
                request = request_of(folder, stage=asked.stage, step=asked.step)
                if request.recipe.pictures == "auto":
                    draw(request, moment=asked.moment, say=_say)
                last = asked.moment == "end"  # earlier ones wait for nothing: a later one sends theirs
                publish_stage(folder, request.recipe, request.stage, _say, wait_seconds=20.0 if last else 0.0)
                if last:
                    write_page(folder)
                    publish_page(folder, request.recipe)
            except Exception as error:  # noqa: BLE001 - the next request may fare better
                _say(f"{asked.stage}, {asked.moment}: {type(error).__name__}: {error}")


def _listen(source: IO[bytes], lines: SimpleQueue[bytes]) -> None:
    for line in source:
        lines.put(line)
    lines.put(b"")


def _pending(lines: SimpleQueue[bytes]) -> list[_Asked]:
    """What has been asked for by now, at least one request, without evaluations that a later one replaces; empty: no
    more will come."""
    found = [lines.get()]
    while not lines.empty():
        found.append(lines.get())
    if found[-1] == b"":
        lines.put(b"")  # for the next call
    asked = [_Asked(**parse_json(line)) for line in found if line]
    last = {each.stage: each.step for each in asked if each.moment == "evaluated"}
    return [each for each in asked if each.moment != "evaluated" or last[each.stage] == each.step]


def _say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(text)}", flush=True)

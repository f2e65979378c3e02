"""Draw pictures, write the run's page and send everything to `tracking.to`, in a child process of rank 0.

    DrawAndSend.ask("pretrain", "begin", step=0)   ->   one line of JSON to its stdin   ->   `drawing.draw`

One child for all stages, forked when rank 0 has its libraries and nothing else: it imports matplotlib and what the
tracking services need, not torch again. It uses no GPU and no lock, runs at low priority (its drawing thread at the
lowest), and ends with rank 0 however that dies. Requests that do not fit into the pipe are dropped. Nobody waits for a
picture: the end waits for sending only, and `shardvit report` draws what is missing. Of several queued evaluations only
the last is drawn. Messages go to RUN/pictures.log, those about sending to stderr. Each tracking service has a thread of
its own, so none waits for another.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

import psutil

from shardvit.data_shards.durable import break_links
from shardvit.data_shards.text import parse_json, printable
from shardvit.launch.local.env import experiment_name, tracking_uri
from shardvit.launch.local.forked import fork
from shardvit.pipeline.recipe.io import parse_recipe
from shardvit.pipeline.recipe.vocabulary import (
    ALL_STAGES,
    PICTURES_FOLDER,
    PICTURES_LOG,
    RECIPE_FILE,
    TRACKING_FOLDER,
    StageName,
)
from shardvit.pipeline.runs.pictures import Moment
from shardvit.pipeline.runs.read import read_run
from shardvit.pipeline.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from shardvit.pipeline.tracking.sender import Sender

_SILENT_SECONDS = 2.0  # announce a longer wait at the end
_POLL_SECONDS = 0.1
_SLACK_SECONDS = 5.0  # on top of the time the child gets to finish
_HURRIED_SECONDS = 30.0  # for sending after a stop or failure
_SHARE_OF_SLOW_SERVICE = 1 / 3  # of the time to finish, for an unresponsive service
_LOW_PRIORITY, _LOWEST_PRIORITY = 10, 19
_PARENT_SECONDS = 2.0

Pictures = Literal["draw", "off"]


class DrawAndSend(AbstractContextManager["DrawAndSend"]):
    """Rank 0's side. `environ` excludes rank variables; `pictures="off"` only sends."""

    def __init__(
        self, folder: RunFolder, *, environ: Mapping[str, str], pictures: Pictures, say: Callable[[str], None]
    ) -> None:
        self._folder, self._say = folder, say
        self._is_asked = self._has_failed = self._is_closed = False
        requests, self._pipe = os.pipe()
        parent = os.getpid()

        def work() -> int:
            os.close(self._pipe)
            return _serve(folder, requests, environ=environ, parent=parent, pictures=pictures)

        self._child = fork(work)
        os.close(requests)
        os.set_blocking(self._pipe, False)

    def ask(self, stage: StageName, moment: Moment, step: int) -> None:
        """Request a stage's pictures; never blocks or raises."""
        try:
            self._write({"stage": stage, "moment": moment, "step": step})
        except OSError as error:  # the process ended, or its pipe is full
            if not self._has_failed:
                self._has_failed = True
                run = self._folder.path
                self._say(f"no pictures for now ({error}): shardvit report {run} draws them, shardvit sync {run} sends")

    def cpu_seconds(self) -> float:
        """Return the process's CPU time so far; 0 after it ends."""
        with suppress(psutil.Error):  # already ended
            return sum(psutil.Process(self._child.pid).cpu_times()[:2])
        return 0.0

    def close(self, *, patience_seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Wait for sending until patience runs out or `hurry`, then end the process."""
        if self._is_closed:
            return
        self._is_closed, child = True, self._child
        with suppress(OSError):
            self._write({"end": patience_seconds})
        os.close(self._pipe)
        begun, is_announced = time.monotonic(), False
        patience = patience_seconds + _SLACK_SECONDS
        while child.poll() is None and not hurry() and (spent := time.monotonic() - begun) < patience:
            if spent > _SILENT_SECONDS and not is_announced:
                is_announced = True
                self._say(f"waiting for tracking, {patience_seconds:g} s at most")
            time.sleep(_POLL_SECONDS)
        if child.poll() is None:
            child.kill()
            child.wait()
            run = self._folder.path
            self._say(
                f"pictures or tracking records are missing: shardvit report {run} draws, shardvit sync {run} sends"
            )

    def __exit__(self, *_: object) -> None:
        if not self._is_asked:  # no stage has begun
            self._child.kill()
        self.close(patience_seconds=_HURRIED_SECONDS)

    def _write(self, record: Mapping[str, object]) -> None:
        if not self._is_asked:  # OSError if the log is a link
            break_links(self._folder.path / PICTURES_LOG)
            self._is_asked = True
        os.write(self._pipe, json.dumps(record).encode() + b"\n")  # whole or not at all, as it is short


# The child process.


def _serve(folder: RunFolder, requests: int, *, environ: Mapping[str, str], parent: int, pictures: Pictures) -> int:
    """Draw what the pipe requests, and send, until it says to end or closes."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(each, signal.SIG_IGN)  # rank 0 handles them, and this process ends with it
    os.nice(_LOW_PRIORITY)
    own = {**environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    os.environ.clear()
    os.environ.update(own)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    records = _requests(requests, parent)
    record = next(records)  # the run folder may not exist before
    screen = os.dup(2)
    with open(folder.path / PICTURES_LOG, "ab") as log:
        for descriptor in (1, 2):  # library output goes there, too
            os.dup2(log.fileno(), descriptor)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    senders = _open_senders(folder, say=partial(_say_on_screen, screen))
    asked: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    over = threading.Event()
    drawing = threading.Thread(target=_draw_all, args=(folder, asked, senders, pictures), daemon=True)
    describing = threading.Thread(target=_write_environment, args=(folder,), daemon=True)
    sending = [threading.Thread(target=_send_all, args=(each, describing, over), daemon=True) for each in senders]
    for thread in (drawing, describing, *sending):
        thread.start()
    while "end" not in record:
        asked.put(record)
        record = next(records)
    asked.put(None)
    deadline = time.monotonic() + record["end"]
    over.set()
    describing.join(record["end"])
    patience_seconds = deadline - time.monotonic()
    for sender, thread in sorted(zip(senders, sending, strict=True), key=lambda each: each[0].is_slow):
        most = record["end"] * _SHARE_OF_SLOW_SERVICE if sender.is_slow else patience_seconds
        thread.join(max(0.0, min(deadline - time.monotonic(), most)))
    if senders and drawing.is_alive() and pictures == "draw":
        run = folder.path
        _say_on_screen(
            screen, f"not all pictures are drawn: shardvit report {run} draws them, shardvit sync {run} sends them"
        )
    for sender in senders:
        if missing := sender.missing():
            sender.say_once(
                "missing", f"{missing} were not sent: `shardvit sync {folder.path}` sends them, or the next run"
            )
    for unfinished in folder.path.glob(f"*/{PICTURES_FOLDER}/*/.*.{os.getpid()}.tmp"):
        unfinished.unlink(missing_ok=True)
    return 0  # without waiting for threads


def _open_senders(folder: RunFolder, *, say: Callable[[str], None]) -> list[Sender]:
    from shardvit.pipeline.tracking.sender import Sender
    from shardvit.pipeline.tracking.sinks.choose import sinks_of

    recipe = parse_recipe(folder.path / RECIPE_FILE)
    names = () if recipe.tracking.mode == "offline" else recipe.tracking.to
    sinks = sinks_of(folder, recipe, names=names, uri=tracking_uri(), experiment=experiment_name())
    return [Sender(folder, recipe, sink, say=say) for sink in sinks]


def _requests(pipe: int, parent: int) -> Iterator[dict[str, Any]]:
    """Yield rank 0's requests; ends this process if rank 0 dies."""
    rest = b""
    while True:
        if select.select([pipe], [], [], _PARENT_SECONDS)[0]:
            if not (more := os.read(pipe, 65_536)):
                os._exit(1)  # rank 0 died; the next attempt starts its own process
            *lines, rest = (rest + more).split(b"\n")
            yield from map(parse_json, lines)
        elif os.getppid() != parent:  # rank 0 died, but a data worker still holds the pipe
            os._exit(1)


def _write_environment(folder: RunFolder) -> None:
    from shardvit.pipeline.tracking.environment import write_environment
    from shardvit.pipeline.tracking.facts import load_facts

    known = [facts.tags for name in ALL_STAGES if (facts := load_facts(folder.stage(name)))]
    try:
        write_environment(folder.path / TRACKING_FOLDER, gpus=known[-1].get("shardvit.gpus", "") if known else "")
    except OSError as error:
        _say(f"the environment is not written down: {error}")


def _send_all(sender: Sender, describing: threading.Thread, over: threading.Event) -> None:
    from shardvit.pipeline.tracking.sender import follow

    describing.join()
    follow(sender, over=over)


def _draw_all(
    folder: RunFolder, lines: SimpleQueue[dict[str, Any] | None], senders: Sequence[Sender], pictures: Pictures
) -> None:
    os.nice(_LOWEST_PRIORITY - _LOW_PRIORITY)  # on Linux, only this thread's
    while pending := _pending(lines):
        if pictures == "off":
            continue
        from shardvit.launch.pages.sections import write_runs
        from shardvit.pipeline.pictures.drawing import draw, request_of

        for asked in pending:
            try:
                request = request_of(folder, stage=asked["stage"], step=asked["step"])
                if request.recipe.pictures == "auto":
                    draw(request, moment=asked["moment"], say=_say)
            except Exception as error:  # noqa: BLE001 - the next request may fare better
                _say(f"{asked['stage']}, {asked['moment']}: {type(error).__name__}: {error}")
            for sender in senders:
                sender.pictures_changed = True
        if any(asked["moment"] == "end" for asked in pending):
            try:
                write_runs([read_run(folder)])
            except Exception as error:  # noqa: BLE001
                _say(f"the page: {type(error).__name__}: {error}")


def _pending(lines: SimpleQueue[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Wait for requests; drops evaluations superseded by later ones. Empty: the end."""
    found = [lines.get()]
    while not lines.empty():
        found.append(lines.get())
    if found[-1] is None:
        lines.put(None)  # for the next call
    asked = [each for each in found if each is not None]
    last = {each["stage"]: each["step"] for each in asked if each["moment"] == "evaluated"}
    return [each for each in asked if each["moment"] != "evaluated" or last[each["stage"]] == each["step"]]


def _say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(text)}", flush=True)


def _say_on_screen(screen: int, text: str) -> None:
    clear = "\r\x1b[K" if os.isatty(screen) else ""  # erase rank 0's progress bar, which redraws itself
    with suppress(OSError):
        os.write(screen, f"{clear}{printable(text)}\n".encode())

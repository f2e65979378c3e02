"""The thread that sends metrics.jsonl to a tracking store, so that training never waits for one.

metrics.jsonl is the outbox: every few seconds the thread sends its new rows and remembers how many were sent
(`tracking_state`), so an outage costs no point, and the next attempt sends what this one could not. What is not a row
(tags, params, files, the final status) is a short list of calls at the beginning and the end of an attempt; the store
remembers those not sent when the process ends, and `close` says how many. A failing call is reported once, then
retried after 1, 2, 4 ... 60 seconds as long as training lasts. Knows nothing of mlflow: `mlflow_store` is the store.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from pipeline.runs.metrics_log import MetricRow, follow_metrics
from pipeline.tracking.tracking_state import RunState

FinalStatus = Literal["FINISHED", "FAILED", "KILLED"]
Result = TypeVar("Result")

_ROWS_PER_BATCH = 200
_TRIES_PER_CALL = 3
_TRIES_AT_CLOSE = 3
_FINISHED_TIMEOUTS = 4  # nobody is about to kill the process of a finished stage, and on a slow machine a short stage
# may still be creating MLflow's tables
_BEGIN_SECONDS = 30.0  # the longest wait for the first row: a first step that is compiled may take longer
_WITHOUT_ANSWER = 1 / 3  # of the time-out is waited for a server whose last answer was incomplete
_SILENT_SECONDS = 2.0  # of the wait at the end pass before it is said: it mostly takes less
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
_MOST_LEFT_BEHIND = 4
_POLL_SECONDS = 0.25
_pause = time.sleep


@dataclass(frozen=True)
class Timing:
    """How often and how long the thread waits.

    Attributes:
        flush_seconds: between two rounds of sending.
        close_seconds: longest wait at the end of a stage; four times as long for a finished one, and a third where
            the store's last answer was incomplete.
        call_seconds: of a call on the store, for its whole answer; None: no limit.
    """

    flush_seconds: float = 2.0
    close_seconds: float = 30.0
    call_seconds: float | None = 60.0


class TrackingStore(Protocol):
    """One stage's run in a tracking store; any method but `answers` may raise anything, and is retried."""

    state: RunState
    place: str  # of the store, for messages

    def connect(self) -> None:
        """Find or create the run; sets `state.sent_rows` to 0 where it is a new one."""

    def answers(self) -> bool:
        """Whether the store is alive and has the run."""
        ...

    def opening_calls(self) -> list[Call]:
        """What to send at the beginning of an attempt."""
        ...

    def send(self, rows: Sequence[MetricRow]) -> list[str]:
        """Send rows; returns one message for each value that a living store refuses."""
        ...

    def closing_calls(self, status: FinalStatus, *, finish_parent: bool) -> list[Call]:
        """Write down how the stage's run ended, with `finish_parent` the pipeline's too; what that leaves to send."""
        ...


@dataclass(frozen=True)
class Call:
    """What is sent once and is no row."""

    name: str
    send: Callable[[], None]


class NoAnswer(Exception):
    """A call had no complete answer in time."""


class Tracker:
    """Sends one attempt's rows and calls to a store, in a daemon thread, until `close`.

    Args:
        store: not connected yet; all its methods are called in the thread.
        metrics_file: the rows, cut at the step resumed from.
        say: prints one line; called from the thread too.
    """

    def __init__(self, store: TrackingStore, *, metrics_file: Path, timing: Timing, say: Callable[[str], None]) -> None:
        self._store = store
        self._metrics_file = metrics_file
        self._timing = timing
        self._say = say
        self._said: set[str] = set()
        self._say_lock = threading.Lock()
        self._bounded = _BoundedCalls(timing.call_seconds)
        self._is_connected = False
        self._offset = 0  # in bytes, of the first row to send
        self._calls: deque[Call] = deque()
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._old_bytes = self._file_bytes()
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
        self._thread.start()

    def close(self, status: FinalStatus, *, finish_parent: bool = False) -> None:
        """Send what is left, within the time-out, and close the run (with `finish_parent` its parent too). Closing
        twice is harmless: the first status stays."""
        if self._closing.is_set():
            return
        store, timeout_seconds = self._store, self._timing.close_seconds
        self._calls += store.closing_calls(status, finish_parent=finish_parent)
        if not self._bounded.is_answered:
            timeout_seconds *= _WITHOUT_ANSWER
        elif status == "FINISHED":
            timeout_seconds *= _FINISHED_TIMEOUTS
        begun = time.monotonic()
        self._deadline = begun + timeout_seconds
        self._bounded.deadline = begun + min(timeout_seconds, self._timing.close_seconds)
        self._closing.set()
        self._thread.join(min(_SILENT_SECONDS, timeout_seconds))
        if self._thread.is_alive():
            self._once(
                "waiting",
                f"MLflow: waiting for {store.place}, {timeout_seconds:g} s at most, to take {self._unsent_points()} "
                f"points and {len(self._calls)} other calls; all processes wait with it",
            )
            self._thread.join(max(0.0, self._deadline - time.monotonic()))
        points, calls = self._unsent_points(), len(self._calls)
        if points or calls:
            self._once(
                "unsent",
                f"MLflow: {points} points and {calls} other calls were not sent: `shardvit sync "
                f"{self._metrics_file.parent.parent}` sends them, or the next attempt",
            )
        with self._say_lock:  # a thread that is left behind stays silent
            self._say = lambda _: None

    def _unsent_points(self) -> int:
        rows = itertools.islice(follow_metrics(self._metrics_file, offset=0), self._store.state.sent_rows, None)
        try:
            return sum(len(row.metrics) for row, _ in rows)
        except OSError:
            return 0

    def _file_bytes(self) -> int:
        try:
            return self._metrics_file.stat().st_size
        except OSError:
            return 0

    def _once(self, kind: str, text: str) -> None:
        with self._say_lock:
            if kind not in self._said:
                self._said.add(kind)
                self._say(without_credentials(" ".join(text.split())))

    # From here on: the thread.

    def _run(self) -> None:
        # Importing MLflow and creating its tables take 7 s of CPU time, which the first step needs more.
        begin = time.monotonic() + _BEGIN_SECONDS
        while self._file_bytes() == self._old_bytes and time.monotonic() < begin:
            if self._closing.wait(_POLL_SECONDS):
                break
        pause_seconds, tries_at_close = _FIRST_PAUSE_SECONDS, 0
        while True:
            closing = self._closing.is_set()  # read before the work, so that the last round sees the last row
            wait_seconds = self._timing.flush_seconds
            try:
                self._work()
                pause_seconds = _FIRST_PAUSE_SECONDS
                if closing:
                    return
            except Exception as error:  # noqa: BLE001  (whatever it was, training goes on)
                kept = "training goes on, MLflow is retried, and metrics.jsonl has every value"
                self._once("outage", f"MLflow: {type(error).__name__}: {str(error)[:300]} ({kept})")
                tries_at_close += closing
                if tries_at_close >= _TRIES_AT_CLOSE or time.monotonic() > self._deadline:
                    return
                if isinstance(error, NoAnswer) and self._closing.is_set():
                    return  # it will not be quicker the next time
                wait_seconds = pause_seconds
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
            if closing:
                time.sleep(min(wait_seconds, _FIRST_PAUSE_SECONDS))
            else:
                self._closing.wait(wait_seconds)

    def _work(self) -> None:
        if not self._is_connected:
            self._bounded(self._store.connect)
            rows = follow_metrics(self._metrics_file, offset=0)
            sent = deque(itertools.islice(rows, self._store.state.sent_rows), maxlen=1)
            self._offset = sent[0][1] if sent else 0
            self._calls.extendleft(reversed(self._store.opening_calls()))
            self._is_connected = True
        while batch := list(itertools.islice(follow_metrics(self._metrics_file, offset=self._offset), _ROWS_PER_BATCH)):
            self._send([row for row, _ in batch])
            self._offset = batch[-1][1]
        while self._calls:
            self._send_call(self._calls[0])
            self._calls.popleft()

    def _send(self, rows: list[MetricRow]) -> None:
        for refusal in self._bounded(lambda: self._store.send(rows)):
            self._once("refused", f"MLflow refuses a value: {refusal[:300]}")
        self._store.state.sent_rows += len(rows)
        try:
            self._store.state.save()
        except OSError as error:
            self._once("state", f"cannot write {self._store.state.file}: {error}")

    def _send_call(self, call: Call) -> None:
        problem = ""
        for number in range(_TRIES_PER_CALL):
            if number:  # a proxy that is busy for a moment answers, too
                _pause(min(_FIRST_PAUSE_SECONDS * 2 ** (number - 1), max(0.0, self._deadline - time.monotonic())))
            try:
                return self._bounded(call.send)
            except NoAnswer:
                raise
            except Exception as error:
                if not self._bounded(self._store.answers):
                    raise  # a dead store is waited for
                problem = str(error)
        self._once(f"call {call.name}", f"MLflow: {call.name} given up: {problem[:300]}")


class _BoundedCalls:
    """Makes calls one by one, each with a time-out for the whole answer: a client's own is from byte to byte.

    A call without a complete answer is left in its thread, its result thrown away, and the caller retries. Costs a
    thread a call, and a few threads that wait on a server which answers a byte a second.
    """

    def __init__(self, timeout_seconds: float | None) -> None:
        self._timeout_seconds = timeout_seconds  # None: calls are made in the calling thread
        self._left_behind: list[futures.Future[object]] = []
        self.deadline = float("inf")  # of `time.monotonic`, also for the call in progress
        self.is_answered = True

    def __call__(self, call: Callable[[], Result]) -> Result:
        """`call`'s result; NoAnswer if it took too long, or several earlier ones are still on their way."""
        if self._timeout_seconds is None:
            return call()
        self._left_behind = [future for future in self._left_behind if not future.done()]
        if len(self._left_behind) >= _MOST_LEFT_BEHIND:
            raise NoAnswer(f"{len(self._left_behind)} calls have no complete answer yet")
        future: futures.Future[Result] = futures.Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  (raised again below)
                future.set_exception(error)

        end = time.monotonic() + self._timeout_seconds
        # Not a pool: its threads are joined when the process ends.
        threading.Thread(target=run, name="tracking call", daemon=True).start()
        while not futures.wait([future], timeout=_POLL_SECONDS).done:
            if time.monotonic() > min(end, self.deadline):
                self._left_behind.append(future)  # pyright: ignore[reportArgumentType]
                self.is_answered = False
                raise NoAnswer(f"the server's answer was incomplete after {self._timeout_seconds:g} s, or at the end")
        self.is_answered = True
        return future.result()


def without_credentials(text: str) -> str:
    """The text without the `user:password@` of its URLs."""
    return re.sub(r"(\w://)[^/\s@]+@", r"\1***@", text)

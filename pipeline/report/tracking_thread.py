"""The thread between training and the tracking store: `log` returns at once, whatever the store does.

Rows wait in a bounded outbox, other calls in a bounded queue; one daemon thread opens the store and sends
them every few seconds. When a call fails, or its answer is not whole in time (`tracking_calls`), the thread counts it,
says so once, and tries again after 1, 2, 4 ... 60 seconds, for as long as training lasts. Rows that no longer fit the
outbox, and those that an earlier attempt left unsent, are read from metrics.jsonl: an outage of any length costs no
point, as long as the caller writes every row there first.

Costs a few microseconds per `log` in the calling thread. Other calls than points (artifacts, tags, statuses)
that were not sent when the process ends are lost; `close` says how many. Knows nothing of mlflow: `tracking`
brings the store.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pipeline.report.metrics_log import MetricRow, iter_metrics
from pipeline.report.tracking_calls import BoundedCalls, NoAnswer
from pipeline.report.tracking_outbox import Outbox
from pipeline.report.tracking_state import RunState

FinalStatus = Literal["FINISHED", "FAILED", "KILLED"]
Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]

_MAX_WAITING_ROWS = 10_000
_MAX_WAITING_JOBS = 1_000
_ROWS_PER_BATCH = 200
_TRIES_PER_JOB = 3
_TRIES_AT_CLOSE = 3
_FINISHED_TIMEOUTS = 4  # nobody is about to kill a process whose stage is finished; a short stage may have MLflow's
# tables still to make, on a slow machine
_BEGIN_SECONDS = 30.0  # a first step that takes longer, as where it is compiled, is waited for no more
_WITHOUT_ANSWER = 1 / 3  # of the time-out is waited for a server whose last answer was not whole in time
_SILENT_SECONDS = 2.0  # of the wait at the end may pass before it is told: it mostly takes less
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0


class Store(Protocol):
    """An open run of a tracking store; any method but `answers` may raise anything."""

    def answers(self) -> bool:
        """Whether the store is alive and has the run."""
        ...

    def send(self, rows: Sequence[MetricRow]) -> list[str]:
        """Send rows; returns one message for each value that a living store refuses."""
        ...

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags on the stage's run."""

    def send_file(self, path: Path, folder: str) -> None:
        """Keep a file with the stage's run."""

    def set_parent_status(self, status: Status) -> None:
        """Set the status of the pipeline's run."""

    def finish(self, status: FinalStatus) -> None:
        """Close the stage's run."""


class Tracker(Protocol):
    """What training may tell the tracking store. No method waits for it but `close` and `wait_connected`."""

    @property
    def failures(self) -> int:
        """Calls that failed so far, each attempt counted; training went on."""
        ...

    @property
    def run_id(self) -> str | None:
        """The store's id of the stage's run; None until it is open."""
        ...

    def log(
        self, step: int, images_seen: int, metrics: Mapping[str, float], *, time_seconds: float | None = None
    ) -> None:
        """Record values at a step. The row stands in metrics.jsonl already; `time_seconds` is that row's
        time."""

    def log_summary(self, metrics: Mapping[str, float]) -> None:
        """Record final values, at the step logged last."""

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Send a file soon; it stays where it is until `close`."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags on the stage's run."""

    def set_parent_status(self, status: Status) -> None:
        """Set the status of the pipeline's run."""

    def wait_connected(self, timeout_seconds: float) -> bool:
        """Wait until the run is open in the store; whether it is."""
        ...

    def close(self, status: FinalStatus, *, finish_parent: bool = False) -> None:
        """Send what is left, within the time-out, and close the run, with `finish_parent` its parent too."""


class NullTracker:
    """Tracks nothing: ranks above 0, and mode off. See `Tracker` for the methods."""

    failures = 0
    run_id = None

    def log(
        self, step: int, images_seen: int, metrics: Mapping[str, float], *, time_seconds: float | None = None
    ) -> None:
        """Nothing."""

    def log_summary(self, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Nothing."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Nothing."""

    def set_parent_status(self, status: Status) -> None:
        """Nothing."""

    def wait_connected(self, timeout_seconds: float) -> bool:
        """Never connected."""
        return False

    def close(self, status: FinalStatus, *, finish_parent: bool = False) -> None:
        """Nothing."""


@dataclass
class Job:
    """A call other than points."""

    name: str
    call: Callable[[], None]
    tries: int = 0


class BackgroundTracker:
    """A tracker whose store lives in a daemon thread. See `Tracker` for the methods.

    Args:
        connect: opens the store; called in the thread, again and again until it succeeds, and sets `state.run_id`.
        describe: the first calls on the open store.
        state: of the stage's run; its mark is rewound already.
        metrics_file: where the rows stand before they come here.
        resume_step: rows up to here are those of earlier attempts.
        flush_seconds: how often it sends.
        close_timeout_seconds: how long `close` waits at most; four times as long for a stage that is finished, and a
            third where the store's last answer was not whole in time.
        call_timeout_seconds: of a call on the store, for the whole of its answer; None: none.
        place: of the store, for messages.
        say: prints one line; called from the thread too.
        max_waiting_rows: that the outbox holds.
    """

    def __init__(
        self,
        *,
        connect: Callable[[], Store],
        describe: Callable[[Store], list[Job]],
        state: RunState,
        metrics_file: Path,
        resume_step: int,
        flush_seconds: float,
        close_timeout_seconds: float,
        say: Callable[[str], None],
        call_timeout_seconds: float | None = None,
        place: str = "the store",
        max_waiting_rows: int = _MAX_WAITING_ROWS,
    ) -> None:
        self._connect = connect
        self._describe = describe
        self._state = state
        self._metrics_file = metrics_file
        self._flush_seconds = flush_seconds
        self._close_timeout_seconds = close_timeout_seconds
        self._say = say
        self._calls = BoundedCalls(call_timeout_seconds)
        self._place = place
        self._said: set[str] = set()
        self._say_lock = threading.Lock()
        self._failures = 0
        self._last_step, self._last_images_seen = max(resume_step, 0), 0
        self._outbox = Outbox(max_rows=max_waiting_rows, gap_below_step=resume_step + 1)
        self._jobs: deque[Job] = deque()
        self._store: Store | None = None
        self._connected = threading.Event()
        self._begin = threading.Event()  # there is something to send
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
        self._thread.start()

    @property
    def failures(self) -> int:
        """See `Tracker`."""
        return self._failures

    @property
    def run_id(self) -> str | None:
        """See `Tracker`."""
        return self._state.run_id if self._connected.is_set() else None

    def log(
        self, step: int, images_seen: int, metrics: Mapping[str, float], *, time_seconds: float | None = None
    ) -> None:
        """See `Tracker`."""
        now = time.time() if time_seconds is None else time_seconds
        values = {name: float(value) for name, value in metrics.items()}
        self._outbox.put(MetricRow(step=step, images_seen=images_seen, time=now, metrics=values))
        self._begin.set()
        self._last_step, self._last_images_seen = step, images_seen

    def log_summary(self, metrics: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self.log(self._last_step, self._last_images_seen, metrics)

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """See `Tracker`."""
        self._add_job(f"artifact {path.name}", lambda: self._open_store().send_file(path, folder))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """See `Tracker`."""
        kept = dict(tags)
        self._add_job("tags", lambda: self._open_store().set_tags(kept))

    def set_parent_status(self, status: Status) -> None:
        """See `Tracker`."""
        self._add_job("status of the pipeline", lambda: self._open_store().set_parent_status(status))

    def wait_connected(self, timeout_seconds: float) -> bool:
        """See `Tracker`."""
        self._begin.set()
        return self._connected.wait(timeout_seconds)

    def close(self, status: FinalStatus, *, finish_parent: bool = False) -> None:
        """See `Tracker`. Closing twice is harmless: the first status stays."""
        if self._closing.is_set():
            return
        self._add_job("status", lambda: self._open_store().finish(status))
        if finish_parent:
            self.set_parent_status(status)
        timeout_seconds = self._close_timeout_seconds * (_FINISHED_TIMEOUTS if status == "FINISHED" else 1)
        if not self._calls.is_answered:
            timeout_seconds = self._close_timeout_seconds * _WITHOUT_ANSWER
        begun = time.monotonic()
        self._deadline = begun + timeout_seconds
        self._calls.end_by(begun + min(timeout_seconds, self._close_timeout_seconds))
        self._closing.set()
        self._begin.set()
        self._thread.join(min(_SILENT_SECONDS, timeout_seconds))
        if self._thread.is_alive():
            self._once(
                "waiting",
                f"MLflow: waiting for {self._place}, {timeout_seconds:g} s at most, to take {self._unsent_points()} "
                f"points and {len(self._jobs)} other calls; all processes wait with it",
            )
            self._thread.join(max(0.0, self._deadline - time.monotonic()))
        points, jobs = self._unsent_points(), len(self._jobs)
        if points or jobs:
            self._once(
                "unsent",
                f"MLflow: {points} points and {jobs} other calls were not sent; the points that are in "
                f"{self._metrics_file} are sent when the stage is opened again",
            )
        with self._say_lock:  # a thread that was left behind has no say any more
            self._say = lambda _: None

    def _add_job(self, name: str, call: Callable[[], None]) -> None:
        if len(self._jobs) >= _MAX_WAITING_JOBS:
            self._count_failure("full", f"MLflow: {_MAX_WAITING_JOBS} calls are waiting, {name} is left out")
        else:
            self._jobs.append(Job(name, call))

    def _unsent_points(self) -> int:
        waiting = self._outbox.head(_MAX_WAITING_ROWS)
        rows = list(waiting.rows)
        if waiting.gap_below_step is not None:
            rows += self._rows_of_gap(waiting.gap_below_step)
        return sum(len(row.metrics) for row in rows)

    def _rows_of_gap(self, below_step: int) -> Iterator[MetricRow]:
        return self._state.sent.unsent(row for row in iter_metrics(self._metrics_file) if row.step < below_step)

    def _count_failure(self, kind: str, text: str) -> None:
        self._failures += 1
        self._once(kind, text)

    def _once(self, kind: str, text: str) -> None:
        with self._say_lock:
            if kind not in self._said:
                self._said.add(kind)
                self._say(without_credentials(" ".join(text.split())))

    # From here on: the thread.

    def _open_store(self) -> Store:
        assert self._store is not None  # jobs run after the connection
        return self._store

    def _run(self) -> None:
        # MLflow's import and its tables take 7 CPU seconds, in which this process's first step would stand behind.
        self._begin.wait(_BEGIN_SECONDS)
        pause_seconds, tries_at_close = _FIRST_PAUSE_SECONDS, 0
        while True:
            closing = self._closing.is_set()  # read before the work, so that the last round sees the last row
            wait_seconds = self._flush_seconds
            try:
                self._work()
                pause_seconds = _FIRST_PAUSE_SECONDS
                if closing:
                    return
            except Exception as error:  # noqa: BLE001  (whatever it was, training goes on)
                kept = "training goes on; tried again, and metrics.jsonl keeps every value"
                self._count_failure("outage", f"MLflow: {type(error).__name__}: {str(error)[:300]} ({kept})")
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
        if self._store is None:
            store = self._calls(self._connect)
            self._jobs.extendleft(reversed(self._describe(store)))
            self._store = store
            self._connected.set()
        self._send_rows(self._store)
        while self._jobs:
            self._do(self._jobs[0], self._store)
            self._jobs.popleft()

    def _send_rows(self, store: Store) -> None:
        while True:
            waiting = self._outbox.head(_ROWS_PER_BATCH)
            if waiting.gap_below_step is not None:
                gap = self._rows_of_gap(waiting.gap_below_step)
                while rows := list(itertools.islice(gap, _ROWS_PER_BATCH)):
                    self._send(store, rows)
                self._outbox.gap_filled(waiting.gap_below_step)
            elif waiting.rows:
                self._send(store, waiting.rows)
                self._outbox.sent(waiting.last_number)
            else:
                return

    def _send(self, store: Store, rows: list[MetricRow]) -> None:
        for refusal in self._calls(lambda: store.send(rows)):
            self._count_failure("refused", f"MLflow refuses a value: {refusal[:300]}")
        self._state.sent = self._state.sent.after(rows)
        try:
            self._state.save()
        except OSError as error:
            self._count_failure("state", f"cannot write {self._state.file}: {error}")

    def _do(self, job: Job, store: Store) -> None:
        try:
            self._calls(job.call)
        except NoAnswer:
            raise
        except Exception as error:
            # A dead store is waited for. When it answers, it is this call that is wrong: three tries, then
            # the next.
            job.tries += self._calls(store.answers)
            if job.tries < _TRIES_PER_JOB:
                raise
            self._count_failure(f"job {job.name}", f"MLflow: {job.name} given up: {str(error)[:300]}")


def without_credentials(text: str) -> str:
    """The text with `user:password@` taken out of its URLs."""
    return re.sub(r"(\w://)[^/\s@]+@", r"\1***@", text)

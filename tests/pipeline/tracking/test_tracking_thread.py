"""The thread against a store that is a list, dead or alive as the test wants it."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pipeline.runs.metrics_log import MetricRow, iter_metrics, open_metrics_log
from pipeline.tracking import tracking_thread
from pipeline.tracking.tracking_state import RunState, load_run_state
from pipeline.tracking.tracking_thread import Call, FinalStatus, Timing, Tracker, without_credentials


class ListStore:
    place = "http://host"

    def __init__(self) -> None:
        self.alive = True
        self.refused = ""
        self.rows: list[MetricRow] = []
        self.calls: list[tuple[str, object]] = []
        self.failures = 0
        self.state = RunState(Path())

    def _check(self) -> None:
        if not self.alive:
            self.failures += 1
            raise ConnectionError("dead at http://me:secret@host")

    def connect(self) -> None:
        self._check()
        self.state.run_id = "run"

    def answers(self) -> bool:
        return self.alive

    def send(self, rows: Sequence[MetricRow]) -> list[str]:
        self._check()
        self.rows += rows
        return [name for row in rows for name in row.metrics if name == self.refused]

    def opening_calls(self) -> list[Call]:
        return [Call("hello", lambda: self._keep("hello", "1"))]

    def _keep(self, name: str, value: object) -> None:
        self._check()
        self.calls.append((name, value))

    def closing_calls(self, status: str, *, finish_parent: bool) -> list[Call]:
        names = ["finish", *(["parent"] if finish_parent else [])]
        return [Call(name, lambda name=name: self._keep(name, status)) for name in names]


class Rig:
    """A tracker with its store, its file and what it said."""

    def __init__(
        self,
        folder: Path,
        *,
        resume_step: int = 0,
        store: ListStore | None = None,
        close_seconds: float = 240.0,
        call_seconds: float | None = None,
    ) -> None:
        self.store = store or ListStore()
        self.said: list[str] = []
        self.file = open_metrics_log(folder / "metrics.jsonl", resume_step=resume_step)
        self.state = self.store.state = load_run_state(folder / "mlflow.json")
        self.state.sent_rows = min(self.state.sent_rows, self.file.kept_rows)
        self.state.save()
        timing = Timing(flush_seconds=0.01, close_seconds=close_seconds, call_seconds=call_seconds)
        self.tracker = Tracker(self.store, metrics_file=self.file.path, timing=timing, say=self.said.append)

    def log(self, *steps: int) -> None:
        for step in steps:
            self.file.append(step=step, images_seen=2 * step, metrics={"loss": 1 / step})

    @property
    def steps(self) -> list[int]:
        return [row.step for row in self.store.rows]


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**settings: object) -> Rig:
        rigs.append(Rig(tmp_path, **settings))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.file.close()
        rig.tracker.close("KILLED")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking_thread, "_FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(tracking_thread, "_LONGEST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(tracking_thread, "_SILENT_SECONDS", 240.0)  # what a slow machine takes is not told


def test_the_wait_at_the_end_is_told_and_a_call_without_a_whole_answer_ends_it(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking_thread, "_SILENT_SECONDS", 0.01)
    rig = make_rig(call_seconds=200.0, close_seconds=2.0)
    rig.log(1)
    until(lambda: rig.steps == [1] and rig.store.calls == [("hello", "1")])
    gate = threading.Event()
    rig.store.send = lambda rows: gate.wait() and []  # type: ignore[method-assign,assignment,return-value]
    rig.log(2, 3)
    rig.tracker.close("FINISHED")
    (waiting,) = [line for line in rig.said if "waiting for" in line]
    assert "http://host, 8 s at most, to take 2 points and 1 other calls" in waiting
    assert any("incomplete after" in line for line in rig.said)
    assert any("2 points and 1 other calls were not sent" in line for line in rig.said)
    gate.set()


def test_what_is_quick_is_not_told(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(call_seconds=200.0)
    rig.log(1)
    rig.tracker.close("FINISHED")
    assert rig.said == [] and rig.steps == [1] and rig.store.calls[-1] == ("finish", "FINISHED")


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 240
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_rows_and_calls_arrive_in_order_and_the_run_is_closed_last(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.log(1, 2)
    rig.file.append(step=2, images_seen=4, metrics={"top1": 0.5})
    rig.tracker.close("FINISHED", finish_parent=True)
    rig.tracker.close("FAILED")
    assert [(row.step, row.images_seen, dict(row.metrics)) for row in rig.store.rows] == [
        (1, 2, {"loss": 1.0}),
        (2, 4, {"loss": 0.5}),
        (2, 4, {"top1": 0.5}),
    ]
    assert rig.store.calls == [
        ("hello", "1"),
        ("finish", "FINISHED"),
        ("parent", "FINISHED"),
    ]
    assert rig.said == []


def test_an_outage_in_the_middle_costs_no_point_and_one_line(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.log(1, 2)
    until(lambda: rig.steps == [1, 2])
    rig.store.alive = False
    rig.log(3, 4)
    until(lambda: rig.store.failures >= 5)
    rig.store.alive = True
    rig.log(5)
    rig.tracker.close("FINISHED")
    assert rig.steps == [1, 2, 3, 4, 5]
    assert rig.store.calls[-1] == ("finish", "FINISHED")
    assert len(rig.said) == 1
    assert "ConnectionError" in rig.said[0]
    assert "secret" not in rig.said[0]


def test_a_store_dead_from_start_to_end_leaves_the_points_to_the_next_attempt(
    make_rig: Callable[..., Rig], tmp_path: Path
) -> None:
    dead = ListStore()
    dead.alive = False
    first = make_rig(store=dead)
    first.log(1, 2, 3, 4)
    first.tracker.close("KILLED")
    assert "4 points and 1 other calls were not sent" in first.said[-1]
    second = make_rig(resume_step=3)
    second.log(4, 5)
    second.tracker.close("FINISHED")
    assert second.steps == [1, 2, 3, 4, 5]
    assert load_run_state(tmp_path / "mlflow.json").sent_rows == 5


def test_a_rollback_sends_the_repeated_steps_again_and_no_others(make_rig: Callable[..., Rig]) -> None:
    first = make_rig()
    first.log(1, 2, 3, 4)
    first.tracker.close("KILLED")
    second = make_rig(resume_step=2)
    second.log(3, 4, 5)
    second.tracker.close("FINISHED")
    assert second.steps == [3, 4, 5]


@pytest.mark.parametrize("seed", range(8))
def test_each_attempt_sends_what_the_store_lacks_whatever_the_file_went_through(
    make_rig: Callable[..., Rig], seed: int
) -> None:
    """Attempts with rollbacks, damaged lines and outages, against a list of what a perfect sender has sent."""
    chance, step, confirmed = random.Random(seed), 0, list[MetricRow]()
    for _ in range(6):
        step = chance.randint(0, step)
        rig = make_rig(resume_step=step)
        confirmed = [row for row in confirmed if row.step <= step]
        rig.store.alive = chance.random() < 0.6
        for _ in range(chance.randint(0, 5)):
            step += chance.randint(1, 2)
            rig.log(*[step] * chance.randint(1, 2))
            if chance.random() < 0.4:
                with rig.file.path.open("ab") as file:
                    file.write(b'{"step": 3, "imag\n')
        rig.tracker.close("KILLED")
        if rig.store.alive:
            rows = list(iter_metrics(rig.file.path))
            assert rig.store.rows == [row for row in rows if row not in confirmed]
            confirmed = rows


@pytest.mark.parametrize("refused", ["hello", "finish"])
def test_a_call_that_a_living_store_refuses_does_not_hold_up_the_others(
    make_rig: Callable[..., Rig], refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = ListStore._keep

    def picky(self: ListStore, name: str, value: object) -> None:
        if name == refused:
            raise ValueError("bad call")
        keep(self, name, value)

    monkeypatch.setattr(ListStore, "_keep", picky)
    monkeypatch.setattr(tracking_thread, "_pause", lambda seconds: None)
    rig = make_rig()
    rig.store.refused = "loss"
    rig.log(1)
    until(lambda: rig.steps == [1])
    rig.tracker.close("FINISHED", finish_parent=True)
    assert rig.steps == [1] and rig.store.calls[-1] == ("parent", "FINISHED")
    assert [line for line in rig.said if f"{refused} given up: bad call" in line]
    assert [line for line in rig.said if "refuses a value: loss" in line]
    assert not any("not sent" in line for line in rig.said)


def test_a_call_that_a_living_store_refuses_for_a_moment_is_sent_after_a_pause(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, pauses = ListStore._keep, list[float]()

    def busy(self: ListStore, name: str, value: object) -> None:
        if name == "hello" and not any(pauses):
            raise ValueError("503")
        keep(self, name, value)

    monkeypatch.setattr(ListStore, "_keep", busy)
    monkeypatch.setattr(tracking_thread, "_pause", pauses.append)
    rig = make_rig()
    rig.log(1)
    until(lambda: rig.steps == [1])
    rig.tracker.close("FINISHED")
    assert "hello" in dict(rig.store.calls) and len(pauses) == 1
    assert not any("given up" in line for line in rig.said)


def test_the_store_is_opened_when_there_is_something_to_send(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking_thread, "_BEGIN_SECONDS", 3600.0)
    rig = make_rig()
    time.sleep(0.05)
    assert rig.state.run_id is None and rig.store.calls == []
    rig.log(1)
    until(lambda: rig.state.run_id is not None)
    monkeypatch.setattr(tracking_thread, "_BEGIN_SECONDS", 0.0)
    late = make_rig()
    until(lambda: late.state.run_id is not None)  # or after a while


def test_a_store_that_hangs_holds_up_neither_log_nor_the_end(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(close_seconds=0.3)
    rig.log(1)
    until(lambda: len(rig.store.calls) == 1)
    release = threading.Event()
    entered = threading.Event()
    rig.store.send = lambda rows: entered.set() or (release.wait() and [])
    rig.log(2)
    assert entered.wait(240)  # from here on the store hangs until it is released below
    rig.log(*range(3, 1003))
    rig.tracker.close("FINISHED")
    release.set()
    assert "1001 points and 1 other calls were not sent" in rig.said[-1]


@pytest.mark.parametrize(("status", "expected"), [("FINISHED", 28.0), ("KILLED", 7.0), ("FAILED", 7.0)])
def test_a_finished_stage_waits_longer_for_what_is_left(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, status: FinalStatus, expected: float
) -> None:
    rig = make_rig(close_seconds=7.0)
    thread, waited = rig.tracker._thread, list[float]()
    join = thread.join
    monkeypatch.setattr(thread, "join", lambda seconds: (waited.append(seconds), join())[1])
    rig.tracker.close(status)
    assert waited == [expected] and rig.store.calls[-1] == ("finish", status)


def test_a_state_that_cannot_be_written_is_counted_and_training_goes_on(
    make_rig: Callable[..., Rig], tmp_path: Path
) -> None:
    rig = make_rig()
    (tmp_path / "file").write_text("")
    rig.state.file = tmp_path / "file" / "mlflow.json"
    rig.log(1)
    rig.tracker.close("FINISHED")
    assert rig.steps == [1]
    assert len(rig.said) == 1 and "cannot write" in rig.said[0]


def test_credentials_are_taken_out_of_urls() -> None:
    assert without_credentials("see https://me:pw@host/x and s3://k@b") == "see https://***@host/x and s3://***@b"
    assert without_credentials("mail me@host, http://host/a@b") == "mail me@host, http://host/a@b"

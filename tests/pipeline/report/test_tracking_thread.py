"""The thread against a store that is a list, dead or alive as the test wants it."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from pipeline.report import tracking_thread
from pipeline.report.metrics_log import MetricRow, open_metrics_log
from pipeline.report.tracking_state import RunState, SentMark, load_run_state
from pipeline.report.tracking_thread import (
    BackgroundTracker,
    FinalStatus,
    Job,
    NullTracker,
    Tracker,
    without_credentials,
)


class ListStore:
    def __init__(self) -> None:
        self.alive = True
        self.refused = ""
        self.rows: list[MetricRow] = []
        self.calls: list[tuple[str, object]] = []

    def _check(self) -> None:
        if not self.alive:
            raise ConnectionError("dead at http://me:secret@host")

    def answers(self) -> bool:
        return self.alive

    def send(self, rows: Sequence[MetricRow]) -> list[str]:
        self._check()
        self.rows += rows
        return [name for row in rows for name in row.metrics if name == self.refused]

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._check()
        if "bad" in tags:
            raise ValueError("bad tag")
        self.calls.append(("tags", dict(tags)))

    def send_file(self, path: Path, folder: str) -> None:
        self._check()
        self.calls.append(("file", (path.read_text(), folder)))

    def set_parent_status(self, status: str) -> None:
        self._check()
        self.calls.append(("parent", status))

    def finish(self, status: str) -> None:
        self._check()
        self.calls.append(("finish", status))


class Rig:
    """A tracker with its store, its file and what it said."""

    def __init__(self, folder: Path, *, resume_step: int = 0, store: ListStore | None = None, **more: object) -> None:
        self.store = store or ListStore()
        self.said: list[str] = []
        self.state = load_run_state(folder / "mlflow.json")
        self.state.sent = self.state.sent.rewound(resume_step)
        self.file = open_metrics_log(folder / "metrics.jsonl", resume_step=resume_step)
        settings = {"flush_seconds": 0.01, "close_timeout_seconds": 240.0, **more}
        self.tracker = BackgroundTracker(
            connect=self._connect,
            describe=lambda store: [Job("hello", lambda: store.set_tags({"hello": "1"}))],
            state=self.state,
            metrics_file=folder / "metrics.jsonl",
            resume_step=resume_step,
            say=self.said.append,
            **settings,
        )

    def _connect(self) -> ListStore:
        if not self.store.alive:
            raise ConnectionError("dead at http://me:secret@host")
        self.state.run_id = "run"
        return self.store

    def log(self, *steps: int) -> None:
        for step in steps:
            row = self.file.append(step=step, images_seen=2 * step, metrics={"loss": 1 / step})
            self.tracker.log(row.step, row.images_seen, row.metrics, time_seconds=row.time)

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
    rig = make_rig(call_timeout_seconds=200.0, close_timeout_seconds=2.0, place="http://host")
    until(lambda: ("tags", {"hello": "1"}) in rig.store.calls)
    gate = threading.Event()
    rig.store.send = lambda rows: gate.wait() and []  # type: ignore[method-assign,assignment,return-value]
    rig.log(1, 2)
    rig.tracker.close("FINISHED")
    (waiting,) = [line for line in rig.said if "waiting for" in line]
    assert "http://host, 8 s at most, to take 2 points and 1 other calls" in waiting
    assert any("not whole after" in line for line in rig.said)
    assert any("2 points and 1 other calls were not sent" in line for line in rig.said)
    gate.set()


def test_what_is_quick_is_not_told(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(call_timeout_seconds=200.0)
    rig.log(1)
    rig.tracker.close("FINISHED")
    assert rig.said == [] and rig.steps == [1] and rig.store.calls[-1] == ("finish", "FINISHED")


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 240
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_rows_and_calls_arrive_in_order_and_the_run_is_closed_last(
    make_rig: Callable[..., Rig], tmp_path: Path
) -> None:
    rig = make_rig()
    artifact = tmp_path / "a.txt"
    artifact.write_text("text")
    assert rig.tracker.wait_connected(240)
    assert rig.tracker.run_id == "run"
    rig.log(1, 2)
    rig.tracker.log_artifact(artifact, "plots")
    rig.tracker.set_tags({"a": "b"})
    rig.tracker.log_summary({"top1": 0.5})
    rig.tracker.close("FINISHED", finish_parent=True)
    rig.tracker.close("FAILED")
    assert [(row.step, row.images_seen, dict(row.metrics)) for row in rig.store.rows] == [
        (1, 2, {"loss": 1.0}),
        (2, 4, {"loss": 0.5}),
        (2, 4, {"top1": 0.5}),
    ]
    assert rig.store.calls == [
        ("tags", {"hello": "1"}),
        ("file", ("text", "plots")),
        ("tags", {"a": "b"}),
        ("finish", "FINISHED"),
        ("parent", "FINISHED"),
    ]
    assert rig.said == []
    assert rig.tracker.failures == 0


def test_an_outage_in_the_middle_costs_no_point_and_one_line(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.log(1, 2)
    until(lambda: rig.steps == [1, 2])
    rig.store.alive = False
    rig.log(3, 4)
    rig.tracker.set_tags({"a": "b"})
    until(lambda: rig.tracker.failures >= 5)
    rig.store.alive = True
    rig.log(5)
    rig.tracker.close("FINISHED")
    assert rig.steps == [1, 2, 3, 4, 5]
    assert rig.store.calls[-2:] == [("tags", {"a": "b"}), ("finish", "FINISHED")]
    assert len(rig.said) == 1
    assert "ConnectionError" in rig.said[0]
    assert "secret" not in rig.said[0]


def test_an_outage_longer_than_the_outbox_is_filled_from_the_file(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_waiting_rows=10)
    rig.log(1)
    until(lambda: rig.steps == [1])
    rig.store.alive = False
    rig.log(*range(2, 500))
    rig.store.alive = True
    rig.tracker.close("FINISHED")
    assert rig.steps == list(range(1, 500))


def test_a_store_dead_from_start_to_end_leaves_the_points_to_the_next_attempt(
    make_rig: Callable[..., Rig], tmp_path: Path
) -> None:
    dead = ListStore()
    dead.alive = False
    first = make_rig(store=dead)
    first.log(1, 2, 3, 4)
    first.tracker.close("KILLED")
    assert first.tracker.run_id is None
    assert "4 points and 1 other calls were not sent" in first.said[-1]
    second = make_rig(resume_step=3)
    second.log(4, 5)
    second.tracker.close("FINISHED")
    assert second.steps == [1, 2, 3, 4, 5]
    assert load_run_state(tmp_path / "mlflow.json").sent == SentMark(step=5, rows=1)


def test_a_rollback_sends_the_repeated_steps_again_and_no_others(make_rig: Callable[..., Rig]) -> None:
    first = make_rig()
    first.log(1, 2, 3, 4)
    first.tracker.close("KILLED")
    second = make_rig(resume_step=2)
    second.log(3, 4, 5)
    second.tracker.close("FINISHED")
    assert second.steps == [3, 4, 5]


def test_a_call_that_a_living_store_refuses_does_not_hold_up_the_others(
    make_rig: Callable[..., Rig], tmp_path: Path
) -> None:
    rig = make_rig()
    rig.store.refused = "loss"
    rig.tracker.set_tags({"bad": "tag"})
    rig.tracker.log_artifact(tmp_path / "is not there")
    rig.tracker.set_tags({"good": "tag"})
    rig.log(1)
    until(lambda: ("tags", {"good": "tag"}) in rig.store.calls)
    rig.tracker.close("FINISHED")
    assert rig.steps == [1]
    assert [line for line in rig.said if "tags given up: bad tag" in line]
    assert [line for line in rig.said if "artifact is not there given up" in line]
    assert [line for line in rig.said if "refuses a value: loss" in line]


def test_the_store_is_opened_when_there_is_something_to_send(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking_thread, "_BEGIN_SECONDS", 3600.0)
    rig = make_rig()
    assert not rig.tracker._connected.wait(0.05) and rig.store.calls == []
    rig.log(1)
    assert rig.tracker._connected.wait(240)
    monkeypatch.setattr(tracking_thread, "_BEGIN_SECONDS", 0.0)
    assert make_rig().tracker._connected.wait(240)  # or after a while


def test_a_store_that_hangs_holds_up_neither_log_nor_the_end(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(close_timeout_seconds=0.3)
    assert rig.tracker.wait_connected(240)
    until(lambda: len(rig.store.calls) == 1)
    release = threading.Event()
    entered = threading.Event()
    rig.store.send = lambda rows: entered.set() or (release.wait() and [])
    rig.log(1)
    assert entered.wait(240)  # from here on the store hangs until it is released below
    for step in range(2, 1002):
        rig.tracker.log(step, step, {"loss": 1.0})
    rig.tracker.close("FINISHED")
    release.set()
    assert "1001 points and 1 other calls were not sent" in rig.said[-1]


@pytest.mark.parametrize(("status", "expected"), [("FINISHED", 28.0), ("KILLED", 7.0), ("FAILED", 7.0)])
def test_a_finished_stage_waits_longer_for_what_is_left(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, status: FinalStatus, expected: float
) -> None:
    rig = make_rig(close_timeout_seconds=7.0)
    thread, waited = rig.tracker._thread, list[float]()
    join = thread.join
    monkeypatch.setattr(thread, "join", lambda seconds: (waited.append(seconds), join())[1])
    rig.tracker.close(status)
    assert waited == [expected] and rig.store.calls[-1] == ("finish", status)


def test_waiting_calls_are_bounded_and_those_left_out_counted(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking_thread, "_MAX_WAITING_JOBS", 3)
    dead = ListStore()
    dead.alive = False
    rig = make_rig(store=dead, flush_seconds=10.0)
    for _ in range(5):
        rig.tracker.set_tags({"a": "b"})
    assert [line for line in rig.said if "3 calls are waiting, tags is left out" in line]
    rig.tracker.close("KILLED")


def test_a_state_that_cannot_be_written_is_counted_and_training_goes_on(
    make_rig: Callable[..., Rig], tmp_path: Path
) -> None:
    rig = make_rig()
    (tmp_path / "file").write_text("")
    rig.state.file = tmp_path / "file" / "mlflow.json"
    rig.log(1)
    rig.tracker.close("FINISHED")
    assert rig.steps == [1]
    assert rig.tracker.failures == 1


def test_the_null_tracker_has_the_whole_interface() -> None:
    tracker: Tracker = NullTracker()
    public = {name for name in vars(Tracker) if not name.startswith("_")}
    assert public <= set(dir(NullTracker))
    assert public <= set(dir(BackgroundTracker))
    tracker.log(1, 2, {"a": 1.0})
    tracker.close("FINISHED")
    assert tracker.failures == 0
    assert not tracker.wait_connected(10)


def test_credentials_are_taken_out_of_urls() -> None:
    assert without_credentials("see https://me:pw@host/x and s3://k@b") == "see https://***@host/x and s3://***@b"
    assert without_credentials("mail me@host, http://host/a@b") == "mail me@host, http://host/a@b"


def test_a_fresh_state_has_nothing_sent(tmp_path: Path) -> None:
    assert RunState(tmp_path / "x").sent == SentMark(step=-1, rows=0)

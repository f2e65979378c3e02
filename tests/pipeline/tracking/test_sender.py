"""The sender against a sink that is a list, dead or alive as the test wants it."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.runs.logs import MetricRow, MetricsLog, iter_metrics
from shardvit.pipeline.runs.pictures import KeptPicture
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.tracking import sender as module
from shardvit.pipeline.tracking.describe import begin_attempt, end_attempt
from shardvit.pipeline.tracking.facts import FinalStatus, RunFacts, RunState, load_run_state
from shardvit.pipeline.tracking.sender import Sender, follow
from shardvit.pipeline.tracking.sinks.sink import ResultModel, RunKind, Sink


class ListSink(Sink):
    """A sink in memory, as anybody may write one."""

    name, title, place, takes = "mlflow", "The list", "http://host", frozenset({"files", "model", "sweep"})

    def __init__(self) -> None:
        self.alive = True
        self.refused = ""
        self.rows: list[MetricRow] = []
        self.calls: list[tuple[str, object]] = []
        self.failures = 0

    def _check(self, name: str, value: object) -> None:
        if not self.alive:
            self.failures += 1
            raise ConnectionError("dead at http://me:secret@host")
        if name == self.refused:
            raise ValueError(f"bad {name}")
        self.calls.append((name, value))

    def connect(self) -> None:
        self._check("connect", None)

    def open(self, known: RunState, *, kind: RunKind, name: str, parent_id: str | None, begun_ms: int | None) -> str:
        self._check("open", name)
        return "stage" if known.file.parent.name == "pretrain" else "pipeline"

    def address(self, run_id: str) -> str | None:
        return None

    def answers(self, run_id: str) -> bool:
        return self.alive

    def params(self, run_id: str, facts: RunFacts) -> None:
        self._check("params", run_id)

    def metrics(self, run_id: str, rows: Sequence[MetricRow]) -> list[str]:
        if not self.alive:
            self._check("metrics", rows)
        self.rows += rows
        return [name for row in rows for name in row.metrics if name == self.refused]

    def file(self, run_id: str, path: Path) -> None:
        self._check("file", path.name)

    def picture(self, run_id: str, picture: KeptPicture, *, is_newest: bool) -> None:
        self._check("picture", picture.step)

    def model(self, result: ResultModel) -> str:
        self._check("model", result.stage)
        return "model"

    def close(self, run_id: str, facts: RunFacts) -> None:
        self._check("close", (run_id, facts.status))


class Rig:
    """An attempt at a stage with a thread that sends, its sink, its file and what was said."""

    def __init__(self, folder: RunFolder, *, resume_step: int = 0, sink: ListSink | None = None) -> None:
        self.sink, self.said, self.folder = sink or ListSink(), list[str](), folder
        recipe = load_recipe("digits", overrides=["name=law"])
        self.file = MetricsLog(folder.stage("pretrain") / "metrics.jsonl", resume_step=resume_step)
        begin_attempt(folder, recipe, "pretrain", kept_rows=self.file.kept_rows, params={}, tags={})
        self.sender = Sender(folder, recipe, self.sink, say=self.said.append)
        self.over = threading.Event()
        self.thread = threading.Thread(target=follow, args=(self.sender,), kwargs={"over": self.over}, daemon=True)
        self.thread.start()

    def log(self, *steps: int) -> None:
        for step in steps:
            self.file.append(step=step, images_seen=2 * step, metrics={"loss": 1 / step})

    @property
    def steps(self) -> list[int]:
        return [row.step for row in self.sink.rows]

    @property
    def state(self) -> RunState:
        return load_run_state(self.folder.stage("pretrain") / "mlflow.json")

    def close(self, status: FinalStatus = "FINISHED", *, wait_seconds: float = 240.0) -> str:
        end_attempt(self.folder, "pretrain", status)
        self.over.set()
        self.thread.join(wait_seconds)
        return self.sender.missing()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "law").mkdir()
    return RunFolder(tmp_path, "law")


@pytest.fixture
def make_rig(folder: RunFolder) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**settings: object) -> Rig:
        rigs.append(Rig(folder, **settings))  # pyright: ignore[reportArgumentType]
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.file.close()
        rig.over.set()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"BEGIN": 0.0, "FLUSH": 0.01, "FIRST_PAUSE": 0.01, "LONGEST_PAUSE": 0.05}.items():
        monkeypatch.setattr(module, f"_{name}_SECONDS", seconds)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 240
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_rows_and_facts_arrive_in_order_and_the_runs_are_closed_last(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.log(1, 2)
    rig.file.append(step=2, images_seen=4, metrics={"top1": 0.5})
    assert rig.close("KILLED") == ""
    assert [(row.step, row.images_seen, dict(row.metrics)) for row in rig.sink.rows] == [
        (1, 2, {"loss": 1.0}),
        (2, 4, {"loss": 0.5}),
        (2, 4, {"top1": 0.5}),
    ]
    assert rig.sink.calls[-2:] == [("close", ("stage", "KILLED")), ("close", ("pipeline", "KILLED"))]
    assert rig.said == []
    calls = len(rig.sink.calls)
    assert rig.sender.round() == 0 and len(rig.sink.calls) == calls  # each once, however often it is asked


def test_pictures_that_are_drawn_during_the_last_round_have_one_more(make_rig: Callable[..., Rig]) -> None:
    rig, late = make_rig(), ["a picture"]
    rig.log(1)
    whole = rig.sender.round

    def round_and_draw() -> int:
        is_last, again = rig.over.is_set(), whole()
        if is_last and late:
            late.clear()
            rig.sender.pictures_changed = True
        return again

    rig.sender.round = round_and_draw
    rig.close()
    assert not late and not rig.sender.pictures_changed


def test_an_outage_in_the_middle_costs_no_point_and_one_line(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.log(1, 2)
    until(lambda: rig.steps == [1, 2])
    rig.sink.alive = False
    rig.log(3, 4)
    until(lambda: rig.sink.failures >= 5)
    assert rig.sender.is_slow
    rig.sink.alive = True
    rig.log(5)
    rig.close()
    assert rig.steps == [1, 2, 3, 4, 5] and not rig.sender.is_slow
    assert ("close", ("stage", "FINISHED")) in rig.sink.calls
    assert len(rig.said) == 1 and "ConnectionError" in rig.said[0] and "secret" not in rig.said[0]


def test_a_sink_dead_from_start_to_end_leaves_the_points_to_the_next_attempt(make_rig: Callable[..., Rig]) -> None:
    dead = ListSink()
    dead.alive = False
    first = make_rig(sink=dead)
    first.log(1, 2, 3, 4)
    assert first.close("KILLED").startswith("4 points and ")
    second = make_rig(resume_step=3)
    second.log(4, 5)
    second.close()
    assert second.steps == [1, 2, 3, 4, 5] and second.state.sent_rows == 5


def test_a_rollback_sends_the_repeated_steps_again_and_no_others(make_rig: Callable[..., Rig]) -> None:
    first = make_rig()
    first.log(1, 2, 3, 4)
    first.close("KILLED")
    second = make_rig(resume_step=2)
    second.log(3, 4, 5)
    second.close()
    assert second.steps == [3, 4, 5]


@pytest.mark.parametrize("seed", range(8))
def test_each_attempt_sends_what_the_sink_lacks_whatever_the_file_went_through(
    make_rig: Callable[..., Rig], seed: int
) -> None:
    """Attempts with rollbacks, damaged lines and outages, against a list of what a perfect sender has sent."""
    chance, step, confirmed = random.Random(seed), 0, list[MetricRow]()
    for _ in range(6):
        step = chance.randint(0, step)
        sink = ListSink()
        sink.alive = chance.random() < 0.6
        rig = make_rig(resume_step=step, sink=sink)
        confirmed = [row for row in confirmed if row.step <= step]
        for _ in range(chance.randint(0, 5)):
            step += chance.randint(1, 2)
            rig.log(*[step] * chance.randint(1, 2))
            if chance.random() < 0.4:
                with rig.file.path.open("ab") as file:
                    file.write(b'{"step": 3, "imag\n')
        rig.close("KILLED")
        if sink.alive:
            rows = list(iter_metrics(rig.file.path))
            assert sink.rows == [row for row in rows if row not in confirmed]
            confirmed = rows


def test_one_sender_follows_a_rollback_within_its_process(folder: RunFolder, make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.log(1, 2, 3, 4)
    until(lambda: rig.steps == [1, 2, 3, 4])
    rig.file.close()
    recipe = load_recipe("digits", overrides=["name=law"])
    rig.file = MetricsLog(rig.file.path, resume_step=2)
    begin_attempt(folder, recipe, "pretrain", kept_rows=rig.file.kept_rows, params={}, tags={})
    rig.log(3, 4, 5)
    rig.close()
    assert rig.steps == [1, 2, 3, 4, 3, 4, 5]


@pytest.mark.parametrize("refused", ["params", "close"])
def test_what_a_living_sink_refuses_does_not_hold_up_the_rest(make_rig: Callable[..., Rig], refused: str) -> None:
    sink = ListSink()
    sink.refused = refused
    rig = make_rig(sink=sink)
    rig.file.append(step=1, images_seen=1, metrics={refused: 1.0})
    assert rig.close() == ""
    assert rig.steps == [1] and ("close" if refused == "params" else "params") in dict(sink.calls)
    assert [line for line in rig.said if f"given up: bad {refused}" in line]
    assert [line for line in rig.said if f"a value is refused: {refused}" in line]


def test_what_a_living_sink_refuses_for_a_moment_is_sent_after_a_pause(make_rig: Callable[..., Rig]) -> None:
    sink = ListSink()
    sink.refused = "params"
    rig = make_rig(sink=sink)
    rig.log(1)
    until(lambda: any("params" not in name for name, _ in sink.calls) and rig.steps == [1])
    sink.refused = ""
    rig.close()
    assert "params" in dict(sink.calls) or any("given up" in line for line in rig.said)


def test_the_sink_is_opened_when_there_is_something_to_send(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BEGIN_SECONDS", 3600.0)
    rig = make_rig()
    time.sleep(0.05)
    assert rig.sink.calls == []
    rig.log(1)
    until(lambda: rig.state.run_id is not None)


def test_a_sink_that_hangs_is_known_to(make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLOW_CALL_SECONDS", 0.05)
    rig, release = make_rig(), threading.Event()
    rig.log(1)
    until(lambda: rig.steps == [1])
    rig.sink.metrics = lambda run_id, rows: release.wait() and []  # type: ignore[method-assign,assignment,return-value]
    rig.log(*range(2, 1003))
    until(lambda: rig.sender.is_slow)
    assert rig.close(wait_seconds=0.1).startswith("1,001 points and ")
    release.set()


def test_a_state_that_cannot_be_written_is_told_and_sending_goes_on(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    until(lambda: rig.state.run_id is not None)
    rig.sender._stages["pretrain"].state.file = rig.folder.path / "law.yaml" / "mlflow.json"
    (rig.folder.path / "law.yaml").write_text("")
    rig.log(1)
    rig.close()
    assert rig.steps == [1] and len(rig.said) == 1 and "cannot write" in rig.said[0]

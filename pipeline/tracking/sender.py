"""THE sender: compares a run's files with what was sent of them, and sends the rest to a sink, each thing once.

`follow` does so while the run trains, in the process beside rank 0 (`launch.draw_and_send`); `sync` does it once.
metrics.jsonl is the outbox: mlflow.json has how many of its rows were sent, and a mark of everything else, so an outage
costs nothing, and the next attempt sends what this one could not. A failure is reported once, then retried after 1, 2,
4 ... 60 seconds. An item that a live service refuses three times is dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from data_shards.safe_paths import is_inside
from pipeline.recipe.schema import Recipe
from pipeline.recipe.vocabulary import (
    CORRUPT_SAMPLES_FILE,
    DIFFERENCE_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    MLFLOW_FACTS_FILE,
    MLFLOW_FILE,
    PAGE_FILE,
    RECIPE_FILE,
    TRACKING_FOLDER,
    StageName,
)
from pipeline.runs.logs import MetricRow, MetricsFollower
from pipeline.runs.pictures import KeptPicture, kept_pictures, newest_pictures
from pipeline.runs.run_folder import RunFolder
from pipeline.tracking.describe import pipeline_facts, stage_description
from pipeline.tracking.environment import TRACKED_FILES
from pipeline.tracking.facts import RunFacts, load_facts
from pipeline.tracking.run_state import RunState, load_run_state, without_credentials
from pipeline.tracking.sink import ResultModel, Sink

Say = Callable[[str], None]
Result = TypeVar("Result")

_ROWS_PER_CALL = 200
_TRIES = 3  # of what a living service refuses, and of an outage at the end
_FLUSH_SECONDS = 2.0
_BEGIN_SECONDS = 30.0  # the longest wait for the first row: a first step that is compiled may take longer
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
_POLL_SECONDS = 0.25
_END_PAUSE_SECONDS = 0.5
_SLOW_CALL_SECONDS = 20.0
LONGEST_REASON = 300


@dataclass
class Synced:
    """Counts of what was sent for a stage."""

    stage: StageName | None = None  # None: of the pipeline
    points: int = 0
    pictures: int = 0
    tables: int = 0
    model: str = ""  # what it is called in the sink
    others: list[str] = field(default_factory=list)  # tags, artifacts, ...
    refused: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """One line for people."""
        counts = ((self.points, "points"), (self.pictures, "pictures"), (self.tables, "tables"))
        parts = [f"{count:,} {what}" for count, what in counts if count] + self.others
        parts += [f"model {self.model}"] if self.model else []
        return f"{self.stage}: " + (", ".join(parts) if parts else "nothing was missing")


@dataclass
class _Followed:
    """A run in the sink: the sweep's, the pipeline's, or a stage's."""

    state: RunState
    stage: StageName | None = None
    curve: MetricsFollower | None = None
    is_open: bool = False
    sent: Synced = field(default_factory=Synced)

    @property
    def of(self) -> str:
        return f"of {self.stage or 'the pipeline'}"


@dataclass(frozen=True)
class _Item:
    """Something, other than rows, that was not sent yet; `key` has `mark` once it was."""

    name: str  # for people
    run: _Followed
    key: str
    mark: str
    send: Callable[[str], object]  # takes the run's id


class Sender:
    """Sends a run's records, `round` by round, in one thread; `say` prints one line."""

    def __init__(self, folder: RunFolder, recipe: Recipe, sink: Sink, *, say: Say) -> None:
        self._folder, self._recipe, self._sink, self._say = folder, recipe, sink, say
        self._said: set[str] = set()
        self._refusals: dict[str, int] = {}
        self._asked_at: float | None = None  # of `time.monotonic`, while an answer is waited for
        self._is_failing = self._is_connected = False
        self.pictures_changed = True  # to be set when there are new ones: looking for them reads many files
        self._sweep = None if folder.sweep is None else self._follow(folder.sweep)
        self._pipeline = self._follow(folder.path)
        self._stages: dict[StageName, _Followed] = {}

    @property
    def is_slow(self) -> bool:
        """True if the last call failed, or the current one is overdue."""
        asked_at = self._asked_at
        return self._is_failing or (asked_at is not None and time.monotonic() - asked_at > _SLOW_CALL_SECONDS)

    def curve_bytes(self) -> int:
        """The size of all metrics.jsonl: it grows when there is something to send."""
        files = [self._folder.stage(name) / METRICS_FILE for name in self._recipe.stages.names]
        return sum(file.stat().st_size for file in files if file.is_file())

    def missing(self) -> str:
        """Describe what is still to be sent, such as "12 points and 3 other things"; "" if nothing."""
        points = sum(len(row.metrics) for each in self._begun() for row in self._unsent_rows(each))
        others = len(self._due(pictures=True))
        return f"{points:,} points and {others:,} other things" if points or others else ""

    def round(self) -> int:
        """Send all that is due; returns how much a living service refused and gets again. Raises whatever an outage
        does."""
        pictures, self.pictures_changed = self.pictures_changed, False
        try:
            self._open()
            for each in self._begun():
                self._send_rows(each)
            again = sum([self._send(item) for item in self._due(pictures=pictures)])
        except BaseException:
            self._is_connected, self._is_failing, self.pictures_changed = False, True, True
            raise
        self._is_failing = False
        self.pictures_changed |= pictures and bool(again)
        return again

    def send_once(self) -> list[Synced]:
        """Send all that is due; returns what was sent of each stage. Raises also what a living service refuses."""
        self._open()
        for each in self._begun():
            self._send_rows(each)
        for item in self._due(pictures=True):
            self._send_item(item)
        sent = [each.sent for each in self._begun()]
        sent[0].others += self._pipeline.sent.others
        return sent

    def tell(self, kind: str, text: str) -> None:
        """Say something of a kind once, without passwords."""
        if kind not in self._said:
            self._said.add(kind)
            self._say(without_credentials(" ".join(text.split())))

    # ---- what is due ----

    def _begun(self) -> list[_Followed]:
        """The stages that this run has begun; what is a link is another run's, and is sent with that."""
        for name in self._recipe.stages.names:
            facts = self._folder.stage(name) / MLFLOW_FACTS_FILE
            if name not in self._stages and facts.is_file() and is_inside(facts, folder=self._folder.path):
                self._stages[name] = self._follow(self._folder.stage(name), stage=name)
        return [self._stages[name] for name in self._recipe.stages.names if name in self._stages]

    def _follow(self, place: Path, *, stage: StageName | None = None) -> _Followed:
        file = place / MLFLOW_FILE
        try:
            state = load_run_state(file)
        except (OSError, ValueError) as error:
            self.tell(f"state {file}", f"MLflow: a new run is begun, for {file} cannot be read: {error}")
            state = RunState(file)
        curve = None if stage is None else MetricsFollower(place / METRICS_FILE)
        return _Followed(state, stage, curve, sent=Synced(stage))

    def _unsent_rows(self, each: _Followed) -> Iterator[MetricRow]:
        assert each.curve is not None and each.stage is not None
        state, facts = each.state, load_facts(self._folder.stage(each.stage))
        kept = facts.kept_rows if facts else ()
        if cuts := kept[state.attempt if state.attempt <= len(kept) else 0 :]:
            # Each attempt began by cutting metrics.jsonl, and what it wrote after that is new.
            state.sent_rows, state.attempt = min(state.sent_rows, *cuts), len(kept)
            self._save(state)
        if each.curve.count != state.sent_rows:
            each.curve.start_over()
        return (row for row in each.curve.new_rows() if each.curve.count > state.sent_rows)

    def _due(self, *, pictures: bool) -> list[_Item]:
        """All but rows: the pipeline's, then each stage's, every status last."""
        items, statuses = self._due_of(self._pipeline, pipeline_facts(self._recipe, self._folder))
        for each in self._begun():
            assert each.stage is not None
            if (facts := load_facts(self._folder.stage(each.stage))) is not None:
                text = stage_description(self._recipe, self._folder, stage=each.stage, params=facts.params)
                more, status = self._due_of(each, replace(facts, description=text))
                items += [*more, *(self._due_pictures(each) if pictures else []), *self._due_model(each)]
                statuses = [*status, *statuses]
        return [item for item in [*items, *statuses] if self._refusals.get(item.name, 0) < _TRIES]

    def _due_of(self, each: _Followed, facts: RunFacts) -> tuple[list[_Item], list[_Item]]:
        """Facts and files; status."""
        sink, sent = self._sink, each.state.sent
        items: list[_Item] = []
        if sent.get("facts") != facts.digest:
            name = f"tags, params, data sets and results {each.of}"
            items.append(_Item(name, each, "facts", facts.digest, lambda run_id: sink.params(run_id, facts)))
        if each.stage is None:
            tracked = [f"{TRACKING_FOLDER}/{name}" for name in TRACKED_FILES]
            files = [RECIPE_FILE, DIFFERENCE_FILE, *tracked, PAGE_FILE]
        else:
            ended = () if facts.status == "RUNNING" else (CORRUPT_SAMPLES_FILE, EVENTS_FILE)
            files = [RECIPE_FILE, *(f"{each.stage}/{name}" for name in ended)]
        for name in files:
            path = self._folder.path / name
            if path.is_file() and is_inside(path, folder=self._folder.path):  # a link may lead to a stranger's
                mark = f"{path.stat().st_size} {path.stat().st_mtime_ns}"
                shown = "the page" if name == PAGE_FILE else f"artifact {path.name} {each.of}"
                if sent.get(name) != mark:
                    items.append(_Item(shown, each, name, mark, lambda run_id, path=path: sink.file(run_id, path)))
        status = _Item(f"status {each.of}", each, "status", facts.status, lambda run_id: sink.close(run_id, facts))
        return items, [status] if sent.get("status") != facts.status else []

    def _due_pictures(self, each: _Followed) -> list[_Item]:
        kept = [one for one in kept_pictures(each.state.file.parent) if _name(one) not in each.state.sent]
        newest = {_name(one) for one in newest_pictures(kept)}

        def item(one: KeptPicture) -> _Item:
            def send(run_id: str) -> None:
                self._sink.picture(run_id, one, is_newest=_name(one) in newest)

            return _Item(f"{'table' if one.table else 'picture'} {_name(one)}", each, _name(one), "sent", send)

        return [item(one) for one in kept]

    def _due_model(self, each: _Followed) -> list[_Item]:
        """The model of the last stage, if that leaves one and is done."""
        stage, folder, recipe = each.stage, self._folder, self._recipe
        is_last = stage == recipe.stages.names[-1] and stage not in ("masked_patch", "swap_head")
        if stage is None or not (recipe.tracking.log_model and is_last):
            return []
        record = folder.peek(stage)
        if record.state != "done" or not record.model_digest or each.state.sent.get("model") == record.model_digest:
            return []

        def send(run_id: str) -> None:
            result = ResultModel(folder, recipe, stage, run_id, str(self._pipeline.state.run_id))
            each.sent.model = self._sink.model(result)

        return [_Item("model", each, "model", record.model_digest, send)]

    # ---- sending ----

    def _open(self) -> None:
        """Have a run for the sweep, the pipeline and each stage that has begun; each id is saved once known."""
        if not self._folder.path.is_dir():
            raise FileNotFoundError(f"{self._folder.path} is gone")  # with it, perhaps, the folder of all runs
        followed = [*([self._sweep] if self._sweep else []), self._pipeline, *self._begun()]
        if not self._is_connected:
            self._ask(self._sink.connect)
            self._is_connected = True
            for each in followed:
                each.is_open = False
        for each in followed:
            if each.is_open:
                continue
            if each is self._sweep:
                assert self._folder.sweep is not None
                name, begun_ms, parent = self._folder.sweep.name, None, None
            else:
                place = self._folder.path if each.stage is None else self._folder.stage(each.stage)
                facts = pipeline_facts(self._recipe, self._folder) if each.stage is None else load_facts(place)
                name, begun_ms = (facts.name, facts.begun_ms) if facts else (place.name, None)
                parent = self._pipeline if each.stage else self._sweep
            parent_id = None if parent is None else parent.state.run_id
            known, state = each.state.run_id, each.state
            run_id = self._ask(partial(self._sink.open, state, name=name, parent_id=parent_id, begun_ms=begun_ms))
            if known not in (None, run_id):
                gone = f"MLflow: run {str(known)[:40]} ({name}) is not in this store"
                self.tell(f"gone {name}", f"{gone}: a new one is filled from the start")
            state.point_to(run_id)
            self._save(state)
            each.is_open = True
            if each is self._pipeline and (address := self._sink.address(run_id)):
                self.tell("address", f"MLflow: {address}")

    def _send_rows(self, each: _Followed) -> None:
        while rows := list(islice(self._unsent_rows(each), _ROWS_PER_CALL)):
            refused = self._ask(partial(self._sink.metrics, str(each.state.run_id), rows))
            each.sent.refused += refused
            for refusal in refused:
                self.tell("refused", f"MLflow refuses a value: {refusal[:LONGEST_REASON]}")
            each.sent.points += sum(len(row.metrics) + 1 for row in rows)  # with images_seen
            each.state.sent_rows += len(rows)
            self._save(each.state)

    def _send(self, item: _Item) -> bool:
        """Send an item; True if a live service refused it and it is to be retried. Raises if the service is down."""
        try:
            self._send_item(item)
        except Exception as error:
            if not self._ask(partial(self._sink.answers, str(item.run.state.run_id))):
                raise
            refusals = self._refusals[item.name] = self._refusals.get(item.name, 0) + 1
            if refusals < _TRIES:  # a proxy that is busy for a moment answers, too
                return True
            self.tell(f"refused {item.name}", f"MLflow: {item.name} given up: {str(error)[:LONGEST_REASON]}")
        return False

    def _send_item(self, item: _Item) -> None:
        state, sent = item.run.state, item.run.sent
        self._ask(partial(item.send, str(state.run_id)))
        state.sent[item.key] = item.mark
        self._save(state)
        if item.name.startswith("picture "):
            sent.pictures += 1
        elif item.name.startswith("table "):
            sent.tables += 1
        elif item.key != "model":
            sent.others.append(item.name)

    def _ask(self, call: Callable[[], Result]) -> Result:
        self._asked_at = time.monotonic()
        try:
            return call()
        finally:
            self._asked_at = None

    def _save(self, state: RunState) -> None:
        try:
            state.save()
        except FileNotFoundError:  # the run folder is gone, which is said elsewhere
            return
        except OSError as error:
            text = f"MLflow: cannot write {state.file}, a resumed stage may begin a new run: {error}"
            self.tell(f"state {state.file}", text)


def _name(one: KeptPicture) -> str:
    return f"{one.picture.name} {one.step}"


def follow(sender: Sender, *, over: threading.Event) -> None:
    """Send what a run writes until it is `over`, and then the rest, unless the service is away."""
    # Importing MLflow and creating its tables take 7 s of CPU time, which the first step needs more.
    begin, size = time.monotonic() + _BEGIN_SECONDS, sender.curve_bytes()
    while sender.curve_bytes() <= size and time.monotonic() < begin and not over.wait(_POLL_SECONDS):
        pass
    pause_seconds, tries_at_end = _FIRST_PAUSE_SECONDS, 0
    while True:
        ending = over.is_set()  # read before the work, so that the last round sees the last row
        wait_seconds = _FLUSH_SECONDS
        try:
            again = sender.round()
            if ending and not again:
                return
            pause_seconds = _FIRST_PAUSE_SECONDS
            if again:
                wait_seconds = pause_seconds
        except Exception as error:  # noqa: BLE001  (whatever it was, it is tried again)
            kept = "training goes on, MLflow is retried, and metrics.jsonl has every value"
            sender.tell("outage", f"MLflow: {type(error).__name__}: {str(error)[:LONGEST_REASON]} ({kept})")
            tries_at_end += ending
            if tries_at_end >= _TRIES:
                return
            wait_seconds, pause_seconds = pause_seconds, min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        if ending:
            time.sleep(min(wait_seconds, _END_PAUSE_SECONDS))
        else:
            over.wait(wait_seconds)

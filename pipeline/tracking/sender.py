"""Send a run's files to a sink, each item once.

`follow` runs during training in a child of rank 0 (`launch.draw_and_send`), `sync_run` once. metrics.jsonl is the
outbox: SINK.json counts the rows sent and marks everything else, so an outage loses nothing. Failures are reported
once and retried after 1, 2, 4 ... 60 seconds. An item that a live service refuses three times is dropped.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

from shardvit.data_shards.safe_paths import is_inside
from shardvit.model.vocabulary import SELF_SUPERVISED
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import (
    CORRUPT_SAMPLES_FILE,
    DIFFERENCE_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    MLFLOW_FACTS_FILE,
    PAGE_FILE,
    RECIPE_FILE,
    TRACKING_FOLDER,
    StageName,
)
from shardvit.pipeline.runs.logs import MetricRow, MetricsFollower, iter_metrics
from shardvit.pipeline.runs.pictures import kept_pictures, newest_pictures
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.tracking.describe import pipeline_facts, stage_description
from shardvit.pipeline.tracking.environment import TRACKED_FILES
from shardvit.pipeline.tracking.facts import RunFacts, RunState, load_facts, load_run_state, without_credentials
from shardvit.pipeline.tracking.sinks.sink import ResultModel, RunKind, Sink

Say = Callable[[str], None]

_ROWS_PER_CALL = 200
_TRIES = 3  # for what a live service refuses, and in an outage at the end
_FLUSH_SECONDS = 2.0
_BEGIN_SECONDS = 30.0  # longest wait for the first row; compiling the first step may take longer
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
_POLL_SECONDS = 0.25
_END_PAUSE_SECONDS = 0.5
_SLOW_CALL_SECONDS = 20.0
LONGEST_REASON = 300


@dataclass
class Synced:
    """Counts of what was sent for a stage."""

    stage: StageName | None = None  # None: the pipeline
    points: int = 0
    pictures: int = 0
    tables: int = 0
    model: str = ""  # its name in the sink
    others: list[str] = field(default_factory=list)  # tags, artifacts, ...

    def describe(self) -> str:
        counts = ((self.points, "points"), (self.pictures, "pictures"), (self.tables, "tables"))
        parts = [f"{count:,} {noun}" for count, noun in counts if count] + self.others
        parts += [f"model {self.model}"] if self.model else []
        return f"{self.stage}: " + (", ".join(parts) if parts else "nothing was missing")


@dataclass
class _Followed:
    """A sink's run of the sweep, the pipeline or a stage."""

    state: RunState
    sent: Synced
    stage: StageName | None = None
    curve: MetricsFollower | None = None
    is_open: bool = False
    is_resumed: bool = False  # the sink's curve, in this session

    @property
    def of(self) -> str:
        return f"of {self.stage or 'the pipeline'}"


@dataclass(frozen=True)
class _Item:
    """Something to send other than rows; once sent, `mark` is saved under `key`."""

    name: str  # for messages
    run: _Followed
    key: str
    mark: str
    send: Callable[[str], object]  # takes the run id


class Sender:
    """Send a run's records, one `round` after another, from a single thread; `say` prints a line."""

    def __init__(self, folder: RunFolder, recipe: Recipe, sink: Sink, *, say: Say) -> None:
        self._folder, self._recipe, self._sink, self._say = folder, recipe, sink, say
        self._said: set[str] = set()
        self._refusals: dict[str, int] = {}
        self._asked_at: float | None = None  # `time.monotonic` at the start of the current call
        self._is_failing = self._is_connected = False
        self.pictures_changed = True  # set it when there are new ones: finding them reads many files
        self._sweep = self._follow(folder.sweep) if folder.sweep and "sweep" in sink.takes else None
        self._pipeline = self._follow(folder.path)
        self._stages: dict[StageName, _Followed] = {}

    @property
    def is_slow(self) -> bool:
        asked_at = self._asked_at
        return self._is_failing or (asked_at is not None and time.monotonic() - asked_at > _SLOW_CALL_SECONDS)

    def curve_bytes(self) -> int:
        files = (self._folder.stage(name) / METRICS_FILE for name in self._recipe.stages.names)
        return sum(file.stat().st_size for file in files if file.is_file())

    def missing(self) -> str:
        """Describe what is unsent, such as "12 points and 3 other things"; "" if nothing."""
        points = sum(len(row.metrics) for each in self._begun() for row in self._unsent_rows(each))
        others = len(self._due(pictures=True))
        return f"{points:,} points and {others:,} other things" if points or others else ""

    def round(self) -> int:
        """Send everything due; returns how many refused items will be retried. Raises if the service is down."""
        pictures, self.pictures_changed = self.pictures_changed, False
        try:
            again = self._send_due(self._try_item, pictures=pictures)
        except BaseException:
            self._is_connected, self._is_failing, self.pictures_changed = False, True, True
            raise
        self._is_failing = False
        self.pictures_changed |= pictures and bool(again)
        return again

    def send_once(self) -> list[Synced]:
        """Send everything due; returns counts by stage. Raises also if a live service refuses an item."""
        self._send_due(self._send_item, pictures=True)
        sent = [each.sent for each in self._begun()]
        sent[0].others += self._pipeline.sent.others
        return sent

    def say_once(self, kind: str, text: str) -> None:
        """Print the first line of each kind, after the sink's name and without passwords."""
        if kind not in self._said:
            self._said.add(kind)
            self._say(without_credentials(f"{self._sink.title}: {' '.join(text.split())}"))

    def release(self) -> None:
        """Let the sink end its runs."""
        with self._asking():
            self._sink.release()

    def _begun(self) -> list[_Followed]:
        """Return the stages this run has begun; a linked one is sent with its own run."""
        for name in self._recipe.stages.names:
            facts = self._folder.stage(name) / MLFLOW_FACTS_FILE
            if name not in self._stages and facts.is_file() and is_inside(facts, folder=self._folder.path):
                self._stages[name] = self._follow(self._folder.stage(name), stage=name)
        return [self._stages[name] for name in self._recipe.stages.names if name in self._stages]

    def _follow(self, place: Path, *, stage: StageName | None = None) -> _Followed:
        file = place / f"{self._sink.name}.json"
        try:
            state = load_run_state(file)
        except (OSError, ValueError) as error:
            self.say_once(f"state {file}", f"a new run is begun, for {file} cannot be read: {error}")
            state = RunState(file)
        curve = None if stage is None else MetricsFollower(place / METRICS_FILE)
        return _Followed(state, Synced(stage), stage, curve)

    def _unsent_rows(self, each: _Followed) -> Iterator[MetricRow]:
        assert each.curve is not None
        held = min((each.state.sent_rows, *self._cuts(each)[0]))
        if each.curve.count != held:
            each.curve.start_over()
        return (row for row in each.curve.new_rows() if each.curve.count > held)

    def _cuts(self, each: _Followed) -> tuple[tuple[int, ...], int]:
        """Return to how many rows attempts have cut metrics.jsonl since it was last sent, and the number of attempts.
        All rows that they wrote after that are new."""
        assert each.stage is not None
        facts, attempt = load_facts(self._folder.stage(each.stage)), each.state.attempt
        kept = facts.kept_rows if facts else ()
        return kept[attempt if attempt <= len(kept) else 0 :], len(kept)

    def _resume_rows(self, each: _Followed) -> None:
        """Agree with the sink on the rows it has: in a session that has any to send, and after a cut."""
        assert each.curve is not None
        state, (cuts, attempts), file = each.state, self._cuts(each), each.curve.path
        if cuts or (not each.is_resumed and next(self._unsent_rows(each), None)):
            with self._asking():
                steps = [row.step for row in iter_metrics(file)]
                self._sink.resume(str(state.run_id), state, kept=min(cuts, default=None), steps=steps)
            state.attempt, each.is_resumed = attempts, True
            self._save(state)

    def _due(self, *, pictures: bool) -> list[_Item]:
        """List unsent items other than rows: the pipeline's, then each stage's, statuses last."""
        sink, folder, recipe = self._sink, self._folder, self._recipe
        known = [(self._pipeline, pipeline_facts(recipe, folder))]
        for each in self._begun():
            assert each.stage is not None
            if (facts := load_facts(folder.stage(each.stage))) is not None:
                text = stage_description(recipe, folder, stage=each.stage, params=facts.params)
                known.append((each, replace(facts, description=text)))
        items: list[_Item] = []
        for each, facts in known:
            name = f"tags, params, data sets and results {each.of}"
            items.append(_Item(name, each, "facts", facts.digest, partial(sink.params, facts=facts)))
            items += self._files(each, facts) if "files" in sink.takes else ()
            if each.stage is not None:
                items += [*(self._pictures(each) if pictures else []), *self._model(each, each.stage)]
        items += [
            _Item(f"status {each.of}", each, "status", facts.status, partial(sink.close, facts=facts))
            for each, facts in reversed(known)
        ]
        return [
            item
            for item in items
            if item.run.state.sent.get(item.key) != item.mark and self._refusals.get(item.name, 0) < _TRIES
        ]

    def _files(self, each: _Followed, facts: RunFacts) -> Iterator[_Item]:
        if each.stage is None:
            names = [RECIPE_FILE, DIFFERENCE_FILE, *(f"{TRACKING_FOLDER}/{name}" for name in TRACKED_FILES), PAGE_FILE]
        else:
            ended = () if facts.status == "RUNNING" else (CORRUPT_SAMPLES_FILE, EVENTS_FILE)
            names = [RECIPE_FILE, *(f"{each.stage}/{name}" for name in ended)]
        for name in names:
            path = self._folder.path / name
            if path.is_file() and is_inside(path, folder=self._folder.path):  # never send the target of a stray link
                mark = f"{path.stat().st_size} {path.stat().st_mtime_ns}"
                shown = "the page" if name == PAGE_FILE else f"artifact {path.name} {each.of}"
                yield _Item(shown, each, name, mark, partial(self._sink.file, path=path))

    def _pictures(self, each: _Followed) -> Iterator[_Item]:
        kept = {one.key: one for one in kept_pictures(each.state.file.parent)}
        newest = {one.key for one in newest_pictures(list(kept.values()))}

        def send(run_id: str, key: str) -> None:
            self._sink.picture(run_id, kept[key], is_newest=key in newest)
            each.sent.tables += kept[key].table is not None
            each.sent.pictures += kept[key].table is None

        for key, one in kept.items():
            yield _Item(f"{'table' if one.table else 'picture'} {key}", each, key, "sent", partial(send, key=key))

    def _model(self, each: _Followed, stage: StageName) -> Iterator[_Item]:
        folder, recipe = self._folder, self._recipe
        is_last = stage == recipe.stages.names[-1] and stage not in (*SELF_SUPERVISED, "swap_head")
        record = folder.peek(stage)

        def send(run_id: str) -> None:
            result = ResultModel(folder, recipe, stage, run_id, str(self._pipeline.state.run_id))
            each.sent.model = self._sink.model(result)

        is_wanted = recipe.tracking.log_model and "model" in self._sink.takes
        is_wanted = is_wanted and recipe.model.custom is None  # nothing else could load it
        if is_wanted and is_last and record.state == "done" and record.model_digest:
            yield _Item("model", each, "model", record.model_digest, send)

    def _send_due(self, send: Callable[[_Item], bool], *, pictures: bool) -> int:
        self._open()
        for each in self._begun():
            self._send_rows(each)
        return sum([send(item) for item in self._due(pictures=pictures)])

    def _open(self) -> None:
        """Open the runs of the sweep, the pipeline and each begun stage; saves ids as soon as known."""
        if not self._folder.path.is_dir():
            raise FileNotFoundError(f"{self._folder.path} is gone")  # connecting could recreate the folder of all runs
        followed = [*([self._sweep] if self._sweep else []), self._pipeline, *self._begun()]
        if not self._is_connected:
            with self._asking():
                self._sink.connect()
            for each in followed:
                each.is_open = each.is_resumed = False
            self._is_connected = True
        for each in followed:
            if not each.is_open:
                self._open_one(each)

    def _open_one(self, each: _Followed) -> None:
        state, place = each.state, each.state.file.parent
        facts = parent = None
        if each is not self._sweep:
            facts = load_facts(place) if each.stage else pipeline_facts(self._recipe, self._folder)
            parent = self._pipeline if each.stage else self._sweep
        name, begun_ms = (facts.name, facts.begun_ms) if facts else (place.name, None)
        parent_id, known = None if parent is None else parent.state.run_id, state.run_id
        kind: RunKind = each.stage or ("sweep" if each is self._sweep else "pipeline")
        self._save(state)  # its key: a kill now must not lead to a second run
        with self._asking():
            run_id = self._sink.open(state, kind=kind, name=name, parent_id=parent_id, begun_ms=begun_ms)
        if known not in (None, run_id):
            gone = f"run {str(known)[:40]} ({name}) is not in this store"
            self.say_once(f"gone {name}", f"{gone}: a new one is filled from the start")
        state.point_to(run_id)
        self._save(state)
        each.is_open = True
        self._say_address(each)

    def _say_address(self, each: _Followed) -> None:
        if each is self._pipeline and (address := self._sink.address(str(each.state.run_id))):
            self.say_once("address", address)

    def _send_rows(self, each: _Followed) -> None:
        self._resume_rows(each)
        while rows := list(islice(self._unsent_rows(each), _ROWS_PER_CALL)):
            with self._asking():
                refused = self._sink.metrics(str(each.state.run_id), rows)
            for refusal in refused:
                self.say_once("refused", f"a value is refused: {refusal[:LONGEST_REASON]}")
            each.sent.points += sum(len(row.metrics) + 1 for row in rows)  # with images_seen
            each.state.sent_rows += len(rows)
            self._save(each.state)

    def _try_item(self, item: _Item) -> bool:
        """Send an item; True if a live service refused it and it will be retried. Raises if the service is down."""
        try:
            return self._send_item(item)
        except Exception as error:
            with self._asking():
                if not self._sink.answers(str(item.run.state.run_id)):
                    raise
            refusals = self._refusals[item.name] = self._refusals.get(item.name, 0) + 1
            if refusals < _TRIES:  # a briefly overloaded proxy also answers
                return True
            self.say_once(f"refused {item.name}", f"{item.name} given up: {str(error)[:LONGEST_REASON]}")
        return False

    def _send_item(self, item: _Item) -> bool:
        state = item.run.state
        with self._asking():
            item.send(str(state.run_id))
        state.sent[item.key] = item.mark
        self._save(state)
        self._say_address(item.run)  # W&B knows it only now
        if item.key != "model" and item.mark != "sent":  # the model and pictures count themselves
            item.run.sent.others.append(item.name)
        return False

    @contextmanager
    def _asking(self) -> Iterator[None]:
        self._asked_at = time.monotonic()
        try:
            yield
        finally:
            self._asked_at = None

    def _save(self, state: RunState) -> None:
        try:
            state.save()
        except FileNotFoundError:  # the run folder is gone, which is reported elsewhere
            return
        except OSError as error:
            text = f"cannot write {state.file}, a resumed stage may begin a new run: {error}"
            self.say_once(f"state {state.file}", text)


def follow(sender: Sender, *, over: threading.Event) -> None:
    """Send what a run writes until `over`, then the rest, unless the service is down."""
    try:
        _follow_until(over, sender)
    finally:
        with suppress(Exception):  # said before, and the next session mends it
            sender.release()


def _follow_until(over: threading.Event, sender: Sender) -> None:
    # Wait for the first row: importing MLflow and creating its tables take 7 CPU seconds, which the first step needs.
    begin, size = time.monotonic() + _BEGIN_SECONDS, sender.curve_bytes()
    while sender.curve_bytes() <= size and time.monotonic() < begin and not over.wait(_POLL_SECONDS):
        pass
    pause_seconds, tries_at_end = _FIRST_PAUSE_SECONDS, 0
    while True:
        is_ending = over.is_set()  # read before the round, so that the last one sees the last row
        wait_seconds = _FLUSH_SECONDS
        try:
            again = sender.round()
            if is_ending and not again and not sender.pictures_changed:  # drawn while the model was sent
                return
            pause_seconds = _FIRST_PAUSE_SECONDS
            if again:
                wait_seconds = pause_seconds
        except Exception as error:  # noqa: BLE001  (retried, whatever it was)
            kept = "training continues, this is retried, and metrics.jsonl has every value"
            sender.say_once("outage", f"{type(error).__name__}: {str(error)[:LONGEST_REASON]} ({kept})")
            tries_at_end += is_ending
            if tries_at_end >= _TRIES:
                return
            wait_seconds, pause_seconds = pause_seconds, min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        if is_ending:
            time.sleep(min(wait_seconds, _END_PAUSE_SECONDS))
        else:
            over.wait(wait_seconds)

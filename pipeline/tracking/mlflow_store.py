"""MLflow: a run per pipeline, a child run per stage; a sweep's run is its pipelines' parent.

All happens in the thread of `tracking_thread`, also the import (2 to 4 s) and creating an SQLite schema (2 to 6 s), so
a slow or dead server neither delays nor stops training. The store is SQLite beside the runs, or the server at
`tracking_uri`. A resumed stage continues its run, found by mlflow.json's id or key (`tracking_state`). What a run is to
know is written down first (`facts`), and what of it was sent afterwards: `sync` sends the rest.

MLflow cannot delete points: steps repeated after a rollback have two there (the later timestamp counts; the tag
shardvit.attempt.N has the step where attempt N began), while metrics.jsonl has each step once. Exact duplicates (step,
time, value) collapse. MLflow keeps infinity as 1.8e308, and NaN as NaN. images_seen is sent with every row.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from data_shards.safe_paths import is_inside
from pipeline.recipe.vocabulary import (
    CORRUPT_SAMPLES_FILE,
    DIFFERENCE_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    MLFLOW_FACTS_FILE,
    MLFLOW_FILE,
    RECIPE_FILE,
    TRACKING_FOLDER,
)
from pipeline.runs.metrics_log import MetricRow, MetricsLog, iter_metrics
from pipeline.runs.written_by import source_tags
from pipeline.tracking.client import MODEL_TRAINING, open_client
from pipeline.tracking.describe import (
    final_results,
    pipeline_description,
    pipeline_params,
    restarts,
    stage_description,
    stage_name,
    stage_params,
)
from pipeline.tracking.environment import TRACKED_FILES, write_environment
from pipeline.tracking.facts import RunFacts, RunStatus, load_facts, now_ms
from pipeline.tracking.runs import send_facts
from pipeline.tracking.settings import TrackerSettings
from pipeline.tracking.tracking_state import RunState, forget_run, load_run_state
from pipeline.tracking.tracking_thread import Call, FinalStatus, Tracker, without_credentials

Say = Callable[[str], None]

_MAX_METRICS_PER_BATCH = 1_000  # from mlflow.utils.validation
_ENVIRONMENT_SECONDS = 10.0  # at the most is it waited for: some tenths of a second of work


def open_tracker(settings: TrackerSettings, *, log: MetricsLog, say: Say | None = None) -> Tracker | OfflineTracker:
    """Begin to send one stage's log, cut at the resumed step, on rank 0 only; returns at once.
    `say` prints one line, from the thread too; None: to stderr."""
    say = say or functools.partial(print, file=sys.stderr, flush=True)
    timing = settings.timing
    if settings.uri.startswith(("sqlite:", "file:", "/")):
        # A local database answers as fast as the disk does, and its connections belong to one thread.
        timing = replace(timing, call_seconds=None)
    store = MlflowStore(settings, say=say)
    store.begin_attempt(from_step=log.resume_step, kept_rows=log.kept_rows)
    if settings.recipe.tracking.mode == "offline":
        return OfflineTracker(store, say=say)
    return Tracker(store, metrics_file=log.path, timing=timing, say=say)


class OfflineTracker:
    """Sends nothing: what is to be known is written down, and `shardvit sync` sends it."""

    def __init__(self, store: MlflowStore, *, say: Say) -> None:
        self._store, self._say, self._is_open = store, say, True
        self._environment = threading.Thread(target=store.note_environment, name="environment", daemon=True)
        self._environment.start()

    def close(self, status: FinalStatus, *, finish_parent: bool = False) -> None:
        """Closing twice is harmless: the first status stays."""
        if self._is_open:
            self._is_open = False
            self._environment.join(_ENVIRONMENT_SECONDS)
            self._store.closing_calls(status, finish_parent=finish_parent)
            if finish_parent:
                self._say(f"MLflow: offline; `shardvit sync {self._store.settings.folder.path}` sends the run")


class MlflowStore:
    """`tracking_thread.TrackingStore` in MLflow: a stage's run, and the pipeline's as its parent."""

    def __init__(self, settings: TrackerSettings, *, say: Say, runs: Literal["open", "as they are"] = "open") -> None:
        self._runs, self._told, self._has_environment = runs, False, False
        self.place = without_credentials(settings.uri)
        self.settings = settings
        self.client: Any = None
        self._say = say
        folder = settings.folder
        self._sweep = None if folder.sweep is None else self._load(folder.sweep / MLFLOW_FILE)
        self._parent = self._load(folder.path / MLFLOW_FILE)
        self.state = self._load(folder.stage(settings.stage) / MLFLOW_FILE)
        self._facts_file = folder.stage(settings.stage) / MLFLOW_FACTS_FILE
        self._parent_facts_file = folder.path / MLFLOW_FACTS_FILE

    def begin_attempt(self, *, from_step: int, kept_rows: int) -> None:
        """Write down what both runs are to know of a new attempt, which has so many rows of the last ones."""
        self.state.attempt += 1
        self.state.sent_rows = min(self.state.sent_rows, kept_rows)  # after a rollback the later ones are new
        for state in (self._parent, self.state):
            self._save(state)
        self._write(self._facts_file, lambda: self._stage_facts(max(0, from_step)))
        self._write(self._parent_facts_file, lambda: self._pipeline_facts("RUNNING"))

    def _stage_facts(self, from_step: int) -> RunFacts:
        settings, attempt = self.settings, self.state.attempt
        recipe, stage, folder = settings.recipe, settings.stage, settings.folder
        before = load_facts(self._facts_file)
        restart = restarts(folder, stage)
        params = {**stage_params(recipe, stage), **settings.params}
        facts = [f"step {from_step}", *(f"{name}={value}" for name, value in _short(settings.tags).items())]
        tags = {
            **(before.tags if before else {}),
            **source_tags(),
            **settings.tags,
            "shardvit.stage": stage,
            "shardvit.attempt": str(attempt),
            f"shardvit.attempt.{attempt}": " ".join(facts),
        }
        if restart:
            tags["shardvit.restart"] = str(restart)
        return RunFacts(
            name=before.name if before else stage_name(recipe, stage, folder=folder, datasets=settings.datasets),
            description=stage_description(recipe, folder, stage=stage, params=params),
            tags=tags,
            params=params,
            datasets=tuple(settings.datasets),
            files=(RECIPE_FILE,),
            begun_ms=before.begun_ms if before else now_ms(),
        )

    def _pipeline_facts(self, status: RunStatus) -> RunFacts:
        """As far as the stages have come; also the data sets of those that ended before this version."""
        folder, recipe = self.settings.folder, self.settings.recipe
        before = load_facts(self._parent_facts_file)
        stages = [load_facts(folder.stage(name) / MLFLOW_FACTS_FILE) for name in recipe.stages.names]
        derived = {
            f"{stage}.{name}": value
            for stage, facts in zip(recipe.stages.names, stages, strict=True)
            for name, value in (facts.params if facts else {}).items()
            if name.startswith(("plan.", "cost."))
        }
        of_run = {name: value for name, value in self.settings.tags.items() if name == "mlflow.user"}
        facts = RunFacts(
            name=recipe.name,
            description=pipeline_description(recipe, folder),
            tags={**source_tags(), **of_run, "shardvit.kind": "pipeline"},
            params={**pipeline_params(recipe), **derived},
            datasets=tuple(dict.fromkeys(one for stage in stages if stage for one in stage.datasets)),
            metrics=before.metrics if before else {},
            files=(RECIPE_FILE, DIFFERENCE_FILE, *(f"{TRACKING_FOLDER}/{name}" for name in TRACKED_FILES)),
            status=status,
            begun_ms=min((each.begun_ms for each in stages if each and each.begun_ms), default=None),
            ended_ms=max((each.ended_ms for each in stages if each and each.ended_ms), default=None),
        )
        return facts.with_metrics(final_results(folder, recipe))

    def _load(self, file: Path) -> RunState:
        try:
            return load_run_state(file)
        except (OSError, ValueError) as error:
            self._say(f"MLflow: a new run is begun, for {file} cannot be read: {error}")
            return RunState(file)

    def _save(self, state: RunState) -> None:
        try:
            state.save()
        except FileNotFoundError:  # the run folder is gone, which is said elsewhere
            return
        except OSError as error:
            self._say(f"MLflow: cannot write {state.file}, a resumed stage may begin a new run: {error}")

    def _write(self, file: Path, facts: Callable[[], RunFacts]) -> None:
        # In the thread that trains: whatever is wrong with what is told, training goes on.
        try:
            facts().save(file)
        except FileNotFoundError:  # the run folder is gone, which is said elsewhere
            return
        except Exception as error:  # noqa: BLE001
            self._say(f"MLflow: cannot write {file}: {type(error).__name__}: {error}")

    def settle(self) -> None:
        """What nobody trains is not running, whatever was written down last: it was killed, or is done. What an
        earlier version has not written down is written now."""
        folder, recipe = self.settings.folder, self.settings.recipe
        if load_facts(self._facts_file) is None:
            self.begin_attempt(from_step=0, kept_rows=self.state.sent_rows)
        done = folder.peek(self.settings.stage).state == "done"
        facts = self._facts_of(self.state)
        if facts.status == "RUNNING":
            facts = replace(facts, status="FINISHED" if done else "KILLED")
        times = [int(row.time * 1000) for row in iter_metrics(folder.stage(self.settings.stage) / METRICS_FILE)]
        begun, ended = min([facts.begun_ms or now_ms(), *times[:1]]), facts.ended_ms or max(times, default=None)
        self._write(self._facts_file, lambda: replace(facts, begun_ms=begun, ended_ms=ended))
        status = self._facts_of(self._parent).status
        if status == "RUNNING":
            status = "FINISHED" if folder.is_complete(recipe) else "KILLED"
        tags = {**self._pipeline_facts(status).tags, **self._facts_of(self._parent).tags}  # of who trained it
        self._write(self._parent_facts_file, lambda: replace(self._pipeline_facts(status), tags=tags))

    def note_environment(self) -> None:
        """Write down what this attempt is computed with, once, whether or not a server can be told."""
        if not self._has_environment:
            self._has_environment = True
            try:
                write_environment(self.settings.folder.path / TRACKING_FOLDER)
            except OSError as error:
                self._say(f"MLflow: the environment is not written down: {error}")

    def connect(self) -> None:
        """Creates the experiment and the pipeline's run too; each id is saved once known."""
        settings = self.settings
        self._connecting = mine = object()  # a call that timed out may still run: only the newest one sets ids
        folder = settings.folder
        if not folder.path.is_dir():
            raise FileNotFoundError(f"{folder.path} is gone")  # with it, perhaps, the folder of all runs
        if self._runs == "open":
            self.note_environment()
        self.client, experiment_id = open_client(settings.uri, home=settings.home, experiment=settings.experiment)
        of_sweep = {}
        if self._sweep is not None:
            assert folder.sweep is not None
            self._open_run(self._sweep, experiment_id, name=folder.sweep.name, tags={}, mine=mine)
            if self._connecting is not mine:
                return
            of_sweep = {"mlflow.parentRunId": str(self._sweep.run_id)}
        self._open_run(self._parent, experiment_id, name=settings.recipe.name, tags=of_sweep, mine=mine)
        if self._connecting is not mine:
            return
        parent = {"mlflow.parentRunId": str(self._parent.run_id)}
        if settings.uri.startswith("http") and self._runs == "open" and not self._told:
            self._told = True
            address = f"{self.place.rstrip('/')}/#/experiments/{experiment_id}/runs/{self._parent.run_id}"
            self._say(f"MLflow: {address}?{MODEL_TRAINING}")
        facts = load_facts(self._facts_file)
        self._open_run(self.state, experiment_id, name=facts.name if facts else settings.stage, tags=parent, mine=mine)

    def _open_run(
        self, state: RunState, experiment_id: str, *, name: str, tags: Mapping[str, str], mine: object
    ) -> None:
        """Make the state's run RUNNING: found by its id, else by its key, else a new one."""
        from mlflow.exceptions import MlflowException

        run = None
        if state.run_id is not None:
            try:
                run = self.client.get_run(state.run_id)
            except MlflowException as error:
                if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):  # the latter: no id
                    raise
            if run is None or run.info.lifecycle_stage == "deleted" or run.data.tags.get("shardvit.key") != state.key:
                self._say(
                    f"MLflow: run {state.run_id[:40]} ({name}) is not in this store: a new one is filled from the start"
                )
                run = None
                if self._connecting is mine:
                    forget_run(state)
        if run is None:
            found = self.client.search_runs([experiment_id], f"tags.`shardvit.key` = '{state.key}'")
            run = found[-1] if found else None
        if run is None:
            begun = None if state is self._sweep else self._facts_of(state).begun_ms
            tags = {"shardvit.key": state.key, **tags}
            run = self.client.create_run(experiment_id, start_time=begun, run_name=name, tags=tags)
        else:
            for tag, value in tags.items():
                self.client.set_tag(run.info.run_id, tag, value)
            if state is not self._sweep and self._runs == "open":  # a sweep's is told by `tell_sweep`
                self.client.update_run(run.info.run_id, status="RUNNING")
        if self._connecting is mine:
            if self._runs == "open" or state.run_id is None:
                state.sent["status"] = "RUNNING"
            state.run_id = str(run.info.run_id)
            self._save(state)

    def answers(self) -> bool:
        try:
            self.client.get_run(self.state.run_id)
        except Exception:  # noqa: BLE001  (any failure means no answer)
            return False
        return True

    def send(self, rows: Sequence[MetricRow]) -> list[str]:
        from mlflow.entities import Metric

        points = [
            Metric(name, value, int(row.time * 1000), row.step)
            for row in rows
            for name, value in {**row.metrics, "images_seen": float(row.images_seen)}.items()
        ]
        batches = (points[i : i + _MAX_METRICS_PER_BATCH] for i in range(0, len(points), _MAX_METRICS_PER_BATCH))
        return [refusal for batch in batches for refusal in self._send_points(batch)]

    def _send_points(self, points: list[Any]) -> list[str]:
        # A batch that a living store refuses is halved until the bad points stand alone.
        try:
            self.client.log_batch(self.state.run_id, metrics=points, synchronous=True)
        except Exception as error:
            if not self.answers():
                raise
            if len(points) == 1:
                return [f"{points[0].key}: {error}"]
            half = len(points) // 2
            return self._send_points(points[:half]) + self._send_points(points[half:])
        return []

    def opening_calls(self) -> list[Call]:
        return [*self._calls(self._parent, "of the pipeline"), *self._calls(self.state, "of the stage")]

    def _calls(self, state: RunState, of: str) -> list[Call]:
        """All but the status; each looks when it is sent whether there is something to send."""
        files = self._facts_of(state).files
        return [
            Call(f"tags, params, data sets and results {of}", partial(self._send_facts, state)),
            *(Call(f"artifact {Path(name).name} {of}", partial(self._send_file, state, name)) for name in files),
        ]

    def closing_calls(self, status: FinalStatus, *, finish_parent: bool) -> list[Call]:
        """How the stage ended is written down, and is what is left to send; with `finish_parent` the pipeline, too."""
        folder, stage = self.settings.folder, self.settings.stage
        more = [
            f"{stage}/{name}" for name in (CORRUPT_SAMPLES_FILE, EVENTS_FILE) if (folder.stage(stage) / name).exists()
        ]
        facts = self._facts_of(self.state)
        ended = replace(facts, status=status, ended_ms=now_ms(), files=tuple(dict.fromkeys((*facts.files, *more))))
        self._write(self._facts_file, lambda: ended)
        self._write(self._parent_facts_file, lambda: self._pipeline_facts(status if finish_parent else "RUNNING"))
        calls = [*self.opening_calls(), Call("status of the stage", partial(self._send_status, self.state))]
        if finish_parent:
            calls.append(Call("status of the pipeline", partial(self._send_status, self._parent)))
        return calls

    def unsent(self) -> list[Call]:
        """What of both runs' facts, files and status is not in the store."""
        return [*self._unsent(self._parent, "of the pipeline"), *self._unsent(self.state, f"of {self.settings.stage}")]

    def _unsent(self, state: RunState, of: str) -> list[Call]:
        facts = self._facts_of(state)
        marks = [("facts", facts.digest), *((name, self._mark(name)) for name in facts.files)]
        due = zip(self._calls(state, of), marks, strict=True)
        calls = [call for call, (name, mark) in due if state.sent.get(name) != mark is not None]
        if state.sent.get("status") != facts.status:
            calls.append(Call(f"status {of}", partial(self._send_status, state)))
        return calls

    def _facts_of(self, state: RunState) -> RunFacts:
        file = self._facts_file if state is self.state else self._parent_facts_file
        return load_facts(file) or RunFacts(name=state.file.parent.name)

    def _send_facts(self, state: RunState) -> None:
        facts = self._facts_of(state)
        if state.sent.get("facts") != facts.digest:
            send_facts(self.client, str(state.run_id), facts, attempt=self.state.attempt)
            self._note_sent(state, "facts", facts.digest)

    def _send_file(self, state: RunState, name: str) -> None:
        mark = self._mark(name)
        if state.sent.get(name) != mark is not None:
            self.client.log_artifact(state.run_id, str(self.settings.folder.path / name))
            self._note_sent(state, name, str(mark))

    def _mark(self, name: str) -> str | None:
        """Changes with a file; None: it is not there, and may never be, as where there are no changes to tell of."""
        folder = self.settings.folder.path
        if not ((folder / name).is_file() and is_inside(folder / name, folder=folder)):  # the name may be a stranger's
            return None
        status = (folder / name).stat()
        return f"{status.st_size} {status.st_mtime_ns}"

    def _send_status(self, state: RunState) -> None:
        facts = self._facts_of(state)
        if facts.status == "RUNNING":
            self.client.update_run(state.run_id, status=facts.status)
        else:
            self.client.set_terminated(state.run_id, status=facts.status, end_time=facts.ended_ms)
        self._note_sent(state, "status", facts.status)

    def _note_sent(self, state: RunState, name: str, mark: str) -> None:
        state.sent[name] = mark
        self._save(state)


def _short(tags: Mapping[str, str]) -> dict[str, str]:
    """The facts that differ from one attempt to the next, by short names."""
    names = {"shardvit.world_size": "processes", "shardvit.host": "host", "shardvit.slurm_job_id": "job"}
    return {short: tags[name] for name, short in names.items() if name in tags}

"""MLflow: a run per pipeline, a child run per stage; a sweep's run is its pipelines' parent.

All happens in the thread of `tracking_thread`, also the import (2 to 4 s) and creating an SQLite schema (2 to 6 s), so
a slow or dead server neither delays nor stops training. The store is SQLite beside the runs, or the server at
`tracking_uri`. A resumed stage continues its run, found by mlflow.json's id or key (`tracking_state`).

MLflow cannot delete points: steps repeated after a rollback have two there (the later timestamp counts; the tag
shardvit.attempt.N has the step where attempt N began), while metrics.jsonl has each step once. Exact duplicates (step,
time, value) collapse. MLflow keeps infinity as 1.8e308, and NaN as NaN. images_seen is sent with every row. No models
and no pictures are logged.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pipeline.checkpoint.written_by import source_tags
from pipeline.metrics_log import MetricRow, MetricsLog
from pipeline.tracking.client import open_client, store_uri
from pipeline.tracking.runs import DatasetInput, log_datasets, log_metrics, log_new_params, set_tags
from pipeline.tracking.tracking_state import RunState, load_run_state
from pipeline.tracking.tracking_thread import Call, FinalStatus, Timing, Tracker, without_credentials
from pipeline.vocabulary import MLFLOW_FILE

Say = Callable[[str], None]

_MAX_METRICS_PER_BATCH = 1_000  # from mlflow.utils.validation


@dataclass(frozen=True, kw_only=True)
class TrackerSettings:
    """What one attempt at one stage tells MLflow.

    `params` are the recipe's, flat and dotted; `tags` this attempt's facts (job id, world size, host). Without
    `tracking_uri` it is sqlite:///RUNS_ROOT/mlflow.db with artifacts in RUNS_ROOT/mlartifacts. `sweep`: the folder of
    the sweep that the pipeline belongs to; the database then lies beside that.
    """

    runs_root: Path
    run_dir: Path
    sweep: Path | None = None
    pipeline: str
    stage: str
    params: Mapping[str, str] = field(default_factory=dict)
    recipe_file: Path | None = None
    datasets: Sequence[DatasetInput] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    tracking_uri: str | None = None
    experiment: str = "shardvit"
    timing: Timing = field(default_factory=Timing)

    @property
    def home(self) -> Path:
        """The folder of all runs, absolute."""
        return (self.runs_root if self.sweep is None else self.sweep.parent).absolute()

    @property
    def uri(self) -> str:
        return store_uri(self.tracking_uri, home=self.home)


def open_tracker(settings: TrackerSettings, *, log: MetricsLog, say: Say | None = None) -> Tracker:
    """Begin to send one stage's log, cut at the resumed step, on rank 0 only; returns at once.
    `say` prints one line, from the thread too; None: to stderr."""
    say = say or functools.partial(print, file=sys.stderr, flush=True)
    timing = settings.timing
    if settings.uri.startswith(("sqlite:", "file:", "/")):
        # A local database answers as fast as the disk does, and its connections belong to one thread.
        timing = replace(timing, call_seconds=None)
    return Tracker(MlflowStore(settings, log=log, say=say), metrics_file=log.path, timing=timing, say=say)


class MlflowStore:
    """`tracking_thread.TrackingStore` in MLflow: a stage's run, and the pipeline's as its parent."""

    def __init__(self, settings: TrackerSettings, *, log: MetricsLog, say: Say) -> None:
        self.place = without_credentials(settings.uri)
        self._settings = settings
        self._from_step = log.resume_step
        self._say = say
        self._client: Any = None
        self._sweep = None if settings.sweep is None else self._load(settings.sweep / MLFLOW_FILE)
        self._parent = self._load(settings.run_dir / MLFLOW_FILE)
        self.state = self._load(log.path.with_name(MLFLOW_FILE))
        self.state.attempt += 1
        self.state.sent_rows = min(self.state.sent_rows, log.kept_rows)  # after a rollback the later ones are new
        for state in (self._parent, self.state):
            self._save(state)

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

    def connect(self) -> None:
        """Creates the experiment and the pipeline's run too; each id is saved once known."""
        settings = self._settings
        self._connecting = mine = object()  # a call that timed out may still run: only the newest one sets ids
        if not settings.run_dir.is_dir():
            raise FileNotFoundError(f"{settings.run_dir} is gone")  # with it, perhaps, the folder of all runs
        self._client, experiment_id = open_client(settings.uri, home=settings.home, experiment=settings.experiment)
        of_sweep = {}
        if self._sweep is not None:
            assert settings.sweep is not None
            self._open_run(self._sweep, experiment_id, name=settings.sweep.name, tags={}, mine=mine)
            if self._connecting is not mine:
                return
            of_sweep = {"mlflow.parentRunId": str(self._sweep.run_id)}
        self._open_run(self._parent, experiment_id, name=settings.pipeline, tags=of_sweep, mine=mine)
        if self._connecting is not mine:
            return
        parent = {"mlflow.parentRunId": str(self._parent.run_id)}
        self._open_run(self.state, experiment_id, name=f"{settings.stage}-{settings.pipeline}", tags=parent, mine=mine)

    def _open_run(
        self, state: RunState, experiment_id: str, *, name: str, tags: Mapping[str, str], mine: object
    ) -> None:
        """Make the state's run RUNNING: found by its id, else by its key, else a new one."""
        from mlflow.exceptions import MlflowException

        run = None
        if state.run_id is not None:
            try:
                run = self._client.get_run(state.run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
            if run is None or run.info.lifecycle_stage == "deleted":
                self._say(
                    f"MLflow: run {state.run_id} ({name}) is not in this store: a new one is filled from the start"
                )
                run = None
                if self._connecting is mine:
                    state.run_id, state.sent_rows = None, 0
        if run is None:
            found = self._client.search_runs([experiment_id], f"tags.`shardvit.key` = '{state.key}'")
            run = found[-1] if found else None
        if run is None:
            run = self._client.create_run(experiment_id, run_name=name, tags={"shardvit.key": state.key, **tags})
        else:
            for tag, value in tags.items():
                self._client.set_tag(run.info.run_id, tag, value)
            if state is not self._sweep:  # whose state is told by `tell_sweep`
                self._client.update_run(run.info.run_id, status="RUNNING")
        if self._connecting is mine:
            state.run_id = str(run.info.run_id)
            self._save(state)

    def answers(self) -> bool:
        try:
            self._client.get_run(self.state.run_id)
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
            self._client.log_batch(self.state.run_id, metrics=points, synchronous=True)
        except Exception as error:
            if not self.answers():
                raise
            if len(points) == 1:
                return [f"{points[0].key}: {error}"]
            half = len(points) // 2
            return self._send_points(points[:half]) + self._send_points(points[half:])
        return []

    def opening_calls(self) -> list[Call]:
        settings, attempt, recipe = self._settings, self.state.attempt, self._settings.recipe_file
        facts = [f"from_step={self._from_step}", *(f"{name}={value}" for name, value in settings.tags.items())]
        tags = {
            **source_tags(),
            **settings.tags,
            "shardvit.stage": settings.stage,
            "shardvit.attempt": str(attempt),
            f"shardvit.attempt.{attempt}": " ".join(facts),
        }
        calls = [
            Call("tags", lambda: self._set_tags(self.state, tags)),
            Call("tags of the pipeline", lambda: self._set_tags(self._parent, source_tags())),
        ]
        if settings.params:
            calls.append(Call("params", self._send_params))
        if settings.datasets:
            calls.append(Call("data sets", self._send_datasets))
        if recipe is not None:
            calls.append(Call(f"artifact {recipe.name}", lambda: self.send_file(recipe)))
            calls.append(Call(f"artifact {recipe.name} of the pipeline", lambda: self._keep(self._parent, recipe)))
        return calls

    def _set_tags(self, state: RunState, tags: Mapping[str, str]) -> None:
        set_tags(self._client, str(state.run_id), tags)

    def _send_params(self) -> None:
        changed = log_new_params(self._client, str(self.state.run_id), self._settings.params)
        if changed:  # a changed one keeps its first value, and a tag has the change
            text = "; ".join(f"{name}: {change}" for name, change in changed.items())
            self._set_tags(self.state, {f"shardvit.params_changed.{self.state.attempt}": text})

    def _send_datasets(self) -> None:
        log_datasets(self._client, str(self.state.run_id), self._settings.datasets)

    def send_file(self, path: Path) -> None:
        self._keep(self.state, path)

    def _keep(self, state: RunState, path: Path) -> None:
        self._client.log_artifact(state.run_id, str(path))

    def finish(self, status: FinalStatus) -> None:
        self._client.set_terminated(self.state.run_id, status=status)

    def finish_parent(self, status: FinalStatus) -> None:
        self._client.set_terminated(self._parent.run_id, status=status)


@dataclass(frozen=True, kw_only=True)
class SweepNews:
    """What a sweep's own run is told, all of it each time; `points` are metrics for the pipelines' runs, by folder.

    No params: MLflow never changes one, and a sweep's grid and share may change.
    """

    folder: Path  # of the sweep, in the folder of all runs
    tags: Mapping[str, str]
    metrics: Mapping[str, float]
    points: Mapping[Path, Mapping[str, float]]
    status: FinalStatus | Literal["RUNNING"]
    tracking_uri: str | None = None
    experiment: str = "shardvit"


def tell_sweep(news: SweepNews) -> None:
    """Find or create a sweep's run and bring it up to date. Raises whatever MLflow does, and OSError, ValueError for
    an mlflow.json that cannot be used."""
    state = load_run_state(news.folder / MLFLOW_FILE)
    state.save()  # its key, before there is a run
    home = news.folder.parent.absolute()
    uri = store_uri(news.tracking_uri, home=home)
    client, experiment_id = open_client(uri, home=home, experiment=news.experiment)
    found = client.search_runs([experiment_id], f"tags.`shardvit.key` = '{state.key}'")
    run = found[-1] if found else None
    if run is None:
        run = client.create_run(experiment_id, run_name=news.folder.name, tags={"shardvit.key": state.key})
    state.run_id = str(run.info.run_id)
    state.save()
    set_tags(client, state.run_id, {**source_tags(), **news.tags})
    log_metrics(client, state.run_id, news.metrics)
    for folder, values in news.points.items():
        point = load_run_state(folder / MLFLOW_FILE).run_id
        if point is not None:  # else MLflow was not told of it
            log_metrics(client, point, values)
    client.update_run(state.run_id, status="RUNNING") if news.status == "RUNNING" else client.set_terminated(
        state.run_id, status=news.status
    )

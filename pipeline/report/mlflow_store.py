"""MLflow: a run per pipeline, a child run per stage; a sweep's run is its pipelines' parent. Only this imports mlflow.

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
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from data_shards.durable import flush
from pipeline.checkpoint.written_by import source_tags
from pipeline.report.metrics_log import MetricRow, MetricsLog
from pipeline.report.tracking_state import RunState, load_run_state
from pipeline.report.tracking_thread import Call, FinalStatus, Timing, Tracker, without_credentials
from pipeline.vocabulary import MLFLOW_FILE

Say = Callable[[str], None]

# From mlflow.utils.validation, and the column `digest` of MLflow's table `datasets`.
_MAX_METRICS_PER_BATCH = 1_000
_MAX_PARAMS_PER_BATCH = 100
_MAX_PARAM_CHARACTERS = 6_000
_MAX_DIGEST_CHARACTERS = 36

_SQLITE = "sqlite:///"
_STALE_SECONDS = 3600.0  # after which an unfinished database is a killed process's


@dataclass(frozen=True, kw_only=True)
class DatasetInput:
    """A data set as MLflow shows it; `context` is train or eval."""

    name: str
    source: str
    digest: str
    context: str


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
        return self.tracking_uri or f"{_SQLITE}{self.home / 'mlflow.db'}"


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
        self._client, experiment_id = _client_of(settings.uri, home=settings.home, experiment=settings.experiment)
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
        from mlflow.entities import RunTag

        entities = [RunTag(name, without_credentials(value)) for name, value in tags.items()]
        self._client.log_batch(state.run_id, tags=entities, synchronous=True)

    def _send_params(self) -> None:
        """Params are write-once: a changed one keeps its first value, and a tag has the change."""
        from mlflow.entities import Param

        params = self._settings.params.items()
        clean = {name: without_credentials(value)[:_MAX_PARAM_CHARACTERS] for name, value in params}
        known = self._client.get_run(self.state.run_id).data.params
        new = [Param(name, value) for name, value in clean.items() if name not in known]
        for start in range(0, len(new), _MAX_PARAMS_PER_BATCH):
            self._client.log_batch(
                self.state.run_id, params=new[start : start + _MAX_PARAMS_PER_BATCH], synchronous=True
            )
        if changed := [f"{name}: {known[name]} -> {now}" for name, now in clean.items() if known.get(name, now) != now]:
            self._set_tags(self.state, {f"shardvit.params_changed.{self.state.attempt}": "; ".join(changed)})

    def _send_datasets(self) -> None:
        from mlflow import entities

        inputs = []
        for one in self._settings.datasets:
            source = json.dumps({"uri": without_credentials(one.source)})
            dataset = entities.Dataset(one.name[:500], one.digest[:_MAX_DIGEST_CHARACTERS], "local", source)
            inputs.append(entities.DatasetInput(dataset, [entities.InputTag("mlflow.data.context", one.context)]))
        self._client.log_inputs(self.state.run_id, datasets=inputs)

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
    uri = news.tracking_uri or f"{_SQLITE}{home / 'mlflow.db'}"
    client, experiment_id = _client_of(uri, home=home, experiment=news.experiment)
    from mlflow.entities import Metric, RunTag

    found = client.search_runs([experiment_id], f"tags.`shardvit.key` = '{state.key}'")
    run = found[-1] if found else None
    if run is None:
        run = client.create_run(experiment_id, run_name=news.folder.name, tags={"shardvit.key": state.key})
    state.run_id = str(run.info.run_id)
    state.save()
    now = int(time.time() * 1000)
    tags = [RunTag(name, without_credentials(value)) for name, value in {**source_tags(), **news.tags}.items()]
    metrics = [Metric(name, value, now, 0) for name, value in news.metrics.items()]
    client.log_batch(state.run_id, metrics=metrics, tags=tags, synchronous=True)
    for folder, values in news.points.items():
        point = load_run_state(folder / MLFLOW_FILE).run_id
        if point is not None:  # else MLflow was not told of it
            points = [Metric(name, value, now, 0) for name, value in values.items()]
            client.log_batch(point, metrics=points, synchronous=True)
    client.update_run(state.run_id, status="RUNNING") if news.status == "RUNNING" else client.set_terminated(
        state.run_id, status=news.status
    )


def _client_of(uri: str, *, home: Path, experiment: str) -> tuple[Any, str]:
    """A client of the store at `uri`, and the experiment's id; store and experiment are made if they are missing."""
    _import_mlflow()
    from mlflow.tracking import MlflowClient

    make_database(uri, create=lambda uri: MlflowClient(tracking_uri=uri).search_experiments(max_results=1))
    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    if found is not None:
        return client, str(found.experiment_id)
    # Without a server MLflow would put artifacts into ./mlruns of the working folder.
    location = (home / "mlartifacts").as_uri() if uri.startswith("sqlite:") else None
    return client, str(client.create_experiment(experiment, artifact_location=location))


def make_database(uri: str, *, create: Callable[[str], object]) -> None:
    """Atomically create a store's SQLite file if it is missing; several processes may.

    MLflow creates some fifty tables in several seconds, and never repairs a database left half-way by a kill: every
    later attempt fails in the same migration. So `create` fills another file, which gets the name when complete.
    Does nothing unless `uri` is sqlite:///FILE. OSError: the disk is full or fails.
    """
    name = uri.removeprefix(_SQLITE)
    if not uri.startswith(_SQLITE) or not name or name.startswith((":", "file:")) or "?" in name or Path(name).exists():
        return
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}.making-*"):
        with suppress(OSError):  # gone meanwhile
            if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                leftover.unlink()
    beside = path.with_name(f".{path.name}.making-{os.getpid()}")
    for leftover in (beside, beside.with_name(f"{beside.name}-journal")):  # PID reuse
        leftover.unlink(missing_ok=True)
    try:
        create(f"{_SQLITE}{beside}")
        flush(beside)
        try:
            os.link(beside, path)
        except FileExistsError:
            pass  # another process was quicker, and its runs are in that one
        except OSError:  # a file system without links
            beside.rename(path)
        flush(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def _import_mlflow() -> None:
    import logging

    # MLflow reads these from the environment only; the user's values stand. Its seven retries would hold one call for
    # 246 s, and the thread has its own back-off. A training job reports to nobody but its user.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    import mlflow.tracking  # noqa: F401

    # Lines on schema steps and retries would break the progress bar; the thread reports failures.
    for name in ("mlflow", "alembic", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.ERROR)

"""MLflow: one run per pipeline and a child run per stage. The only file that imports mlflow.

`open_tracker` returns at once. All that MLflow does, importing it (2 to 4 s) and making an SQLite schema (2 to 6 s)
included, happens in the thread of `tracking_thread`, so a slow or dead server neither delays nor stops
training. The store is SQLite beside the runs, or the server at `tracking_uri`. A resumed stage goes on in its
own run, found by the id, or the key, that `tracking_state` keeps in NAME/mlflow.json and
NAME/STAGE/mlflow.json.

A rollback repeats steps, and MLflow cannot delete points: a step that it has already gets a second point (the
later timestamp counts; the tag shardvit.attempt.N tells from which step attempt N went on), while
metrics.jsonl has each step once. Exact duplicates (step, time and value) collapse. MLflow keeps an infinity
as 1.8e308; NaN stays NaN.

It sends images_seen as a metric of its own with every row, and names no other. It logs no models and no
pictures.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline.checkpoint.source_tags import source_tags
from pipeline.report.metrics_log import MetricRow
from pipeline.report.tracking_database import make_database
from pipeline.report.tracking_state import RunState, SentMark, load_run_state
from pipeline.report.tracking_thread import (
    BackgroundTracker,
    FinalStatus,
    Job,
    NullTracker,
    Status,
    Store,
    Tracker,
    without_credentials,
)

__all__ = ["DatasetInput", "NullTracker", "Tracker", "TrackerSettings", "open_tracker"]

Say = Callable[[str], None]

# The four limits are those of mlflow.utils.validation, and of the column `digest` in MLflow's table
# `datasets`.
_MAX_METRICS_PER_BATCH = 1_000
_MAX_PARAMS_PER_BATCH = 100
_MAX_PARAM_CHARACTERS = 6_000
_MAX_DIGEST_CHARACTERS = 36


@dataclass(frozen=True, kw_only=True)
class DatasetInput:
    """A data set as MLflow shows it: `digest` of at most 36 characters, `context` such as train or eval."""

    name: str
    source: str
    digest: str
    context: str

    def __post_init__(self) -> None:
        if len(self.digest) > _MAX_DIGEST_CHARACTERS:
            raise ValueError(f"the digest of data set {self.name} is longer than {_MAX_DIGEST_CHARACTERS} characters")


@dataclass(frozen=True, kw_only=True)
class TrackerSettings:
    """What one attempt at one stage tells MLflow.

    `params` are the recipe's, flat and dotted; `tags` the facts of this attempt (job id, world size, host).
    `resume_step` is the last step done before this attempt: rows of metrics.jsonl up to it, and no others,
    are sent when the store lacks them.
    `tracking_uri` None is sqlite:///RUNS_ROOT/mlflow.db with its artifacts in RUNS_ROOT/mlartifacts.
    `system_metrics` adds MLflow's own CPU, memory, disk, network and GPU curves of this machine.
    """

    runs_root: Path
    run_dir: Path
    pipeline: str
    stage: str
    resume_step: int
    params: Mapping[str, str] = field(default_factory=dict)
    recipe_file: Path | None = None
    datasets: Sequence[DatasetInput] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    mode: Literal["mlflow", "off"] = "mlflow"
    tracking_uri: str | None = None
    experiment: str | None = None
    system_metrics: Literal["on", "off"] = "off"
    flush_seconds: float = 2.0
    close_timeout_seconds: float = 30.0
    call_timeout_seconds: float = 60.0

    @property
    def uri(self) -> str:
        """The store's address."""
        return self.tracking_uri or f"sqlite:///{self.runs_root.absolute() / 'mlflow.db'}"


def open_tracker(settings: TrackerSettings, *, say: Say | None = None) -> Tracker:
    """Open the tracker of one stage, on rank 0 only; returns at once, MLflow is opened in the background.

    metrics.jsonl must have been cut at `resume_step` before (`open_metrics_log`). `say` prints one line, from
    the thread too (`Progress.note` fits); without it lines go to stderr.
    """
    if settings.mode == "off":
        return NullTracker()
    say = say or functools.partial(print, file=sys.stderr, flush=True)
    stage_folder = settings.run_dir / settings.stage
    parent = _load(settings.run_dir / "mlflow.json", say=say)
    child = _load(stage_folder / "mlflow.json", say=say)
    child.attempt += 1
    child.sent = child.sent.rewound(settings.resume_step)
    for state in (parent, child):
        _save(state, say=say)
    return BackgroundTracker(
        connect=lambda: _connect(settings, parent=parent, child=child, say=say),
        describe=lambda store: _describing_jobs(store, settings, attempt=child.attempt),
        state=child,
        metrics_file=stage_folder / "metrics.jsonl",
        resume_step=settings.resume_step,
        flush_seconds=settings.flush_seconds,
        close_timeout_seconds=settings.close_timeout_seconds,
        say=say,
        # What is a file here answers as fast as the disk does, and its connections belong to one thread.
        call_timeout_seconds=None
        if settings.uri.startswith(("sqlite:", "file:", "/"))
        else settings.call_timeout_seconds,
        place=without_credentials(settings.uri),
    )


class MlflowStore:
    """The calls on one open stage run: `tracking_thread.Store` in MLflow."""

    def __init__(self, client: Any, *, parent_id: str, run_id: str, uri: str) -> None:
        self._client = client
        self._parent_id = parent_id
        self._run_id = run_id
        self._uri = uri
        self._monitor: Any = None

    def answers(self) -> bool:
        """See `Store`."""
        try:
            self._client.get_run(self._run_id)
        except Exception:  # noqa: BLE001  (any failure means no answer)
            return False
        return True

    def send(self, rows: Sequence[MetricRow]) -> list[str]:
        """See `Store`."""
        from mlflow.entities import Metric

        points = [
            Metric(name, value, int(row.time * 1000), row.step)
            for row in rows
            for name, value in {**row.metrics, "images_seen": float(row.images_seen)}.items()
        ]
        batches = (points[i : i + _MAX_METRICS_PER_BATCH] for i in range(0, len(points), _MAX_METRICS_PER_BATCH))
        return [refusal for batch in batches for refusal in self._send_points(batch)]

    def _send_points(self, points: list[Any]) -> list[str]:
        # A batch that a living store refuses is halved until the points at fault stand alone.
        try:
            self._client.log_batch(self._run_id, metrics=points, synchronous=True)
        except Exception as error:
            if not self.answers():
                raise
            if len(points) == 1:
                return [f"{points[0].key}: {error}"]
            half = len(points) // 2
            return self._send_points(points[:half]) + self._send_points(points[half:])
        return []

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """See `Store`."""
        self._set_tags(self._run_id, tags)

    def set_parent_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags on the pipeline's run."""
        self._set_tags(self._parent_id, tags)

    def _set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        entities = [RunTag(name, without_credentials(value)) for name, value in tags.items()]
        self._client.log_batch(run_id, tags=entities, synchronous=True)

    def send_params(self, params: Mapping[str, str], *, attempt: int) -> None:
        """Params are write-once: a changed one keeps its first value, and a tag tells the change."""
        from mlflow.entities import Param

        clean = {name: without_credentials(value)[:_MAX_PARAM_CHARACTERS] for name, value in params.items()}
        known = self._client.get_run(self._run_id).data.params
        new = [Param(name, value) for name, value in clean.items() if name not in known]
        for start in range(0, len(new), _MAX_PARAMS_PER_BATCH):
            self._client.log_batch(self._run_id, params=new[start : start + _MAX_PARAMS_PER_BATCH], synchronous=True)
        changed = [
            f"{name}: {known[name]} -> {value}" for name, value in clean.items() if known.get(name, value) != value
        ]
        if changed:
            self.set_tags({f"shardvit.params_changed.{attempt}": "; ".join(changed)})

    def send_datasets(self, datasets: Sequence[DatasetInput]) -> None:
        """Data sets as inputs of the stage's run; the same again changes nothing."""
        from mlflow import entities

        inputs = [
            entities.DatasetInput(
                entities.Dataset(
                    one.name[:500], one.digest, "local", json.dumps({"uri": without_credentials(one.source)})
                ),
                [entities.InputTag("mlflow.data.context", one.context)],
            )
            for one in datasets
        ]
        self._client.log_inputs(self._run_id, datasets=inputs)

    def send_file(self, path: Path, folder: str) -> None:
        """See `Store`."""
        self._client.log_artifact(self._run_id, str(path), folder or None)

    def send_parent_file(self, path: Path) -> None:
        """Keep a file with the pipeline's run."""
        self._client.log_artifact(self._parent_id, str(path))

    def start_system_metrics(self) -> None:
        """Begin MLflow's curves of this machine, in a thread of MLflow's own; `finish` ends them."""
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        self._monitor = SystemMetricsMonitor(self._run_id, resume_logging=True, tracking_uri=self._uri)
        self._monitor.start()

    def set_parent_status(self, status: Status) -> None:
        """See `Store`."""
        if status == "RUNNING":
            self._client.update_run(self._parent_id, status=status)
        else:
            self._client.set_terminated(self._parent_id, status=status)

    def finish(self, status: FinalStatus) -> None:
        """See `Store`."""
        if self._monitor is not None:
            self._monitor.finish()
        self._client.set_terminated(self._run_id, status=status)


def _describing_jobs(store: Store, settings: TrackerSettings, *, attempt: int) -> list[Job]:
    """What every attempt tells the store at its beginning."""
    assert isinstance(store, MlflowStore)
    facts = [
        f"from_step={settings.resume_step}",
        *(f"{name}={value}" for name, value in settings.tags.items()),
    ]
    tags = {
        **source_tags(),
        **settings.tags,
        "shardvit.stage": settings.stage,
        "shardvit.attempt": str(attempt),
        f"shardvit.attempt.{attempt}": " ".join(facts),
    }
    jobs = [
        Job("tags", lambda: store.set_tags(tags)),
        Job("tags of the pipeline", lambda: store.set_parent_tags(source_tags())),
    ]
    if settings.params:
        jobs.append(Job("params", lambda: store.send_params(settings.params, attempt=attempt)))
    if settings.datasets:
        jobs.append(Job("data sets", lambda: store.send_datasets(settings.datasets)))
    recipe = settings.recipe_file
    if recipe is not None:
        jobs.append(Job(f"artifact {recipe.name}", lambda: store.send_file(recipe, "")))
        jobs.append(Job(f"artifact {recipe.name} of the pipeline", lambda: store.send_parent_file(recipe)))
    if settings.system_metrics == "on":
        jobs.append(Job("system metrics", store.start_system_metrics))
    return jobs


def _connect(settings: TrackerSettings, *, parent: RunState, child: RunState, say: Say) -> MlflowStore:
    """Find or make the experiment, the parent run and the stage's run; each id is saved as soon as it is
    known."""
    _import_mlflow()
    from mlflow.tracking import MlflowClient

    if not settings.run_dir.is_dir():
        raise FileNotFoundError(f"{settings.run_dir} is gone")  # with it, perhaps, the folder of all runs
    make_database(settings.uri, create=lambda uri: MlflowClient(tracking_uri=uri).search_experiments(max_results=1))
    client = MlflowClient(tracking_uri=settings.uri)
    name = settings.experiment or "shardvit"
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        experiment_id = experiment.experiment_id
    else:
        # Without a server MLflow would put artifacts into ./mlruns, wherever that is.
        local = settings.uri.startswith("sqlite:")
        location = (settings.runs_root.absolute() / "mlartifacts").as_uri() if local else None
        experiment_id = client.create_experiment(name, artifact_location=location)
    parent_id = _open_run(client, experiment_id, state=parent, name=settings.pipeline, tags={}, say=say)
    run_id = _open_run(
        client,
        experiment_id,
        state=child,
        name=f"{settings.stage}-{settings.pipeline}",
        tags={"mlflow.parentRunId": parent_id},
        say=say,
    )
    return MlflowStore(client, parent_id=parent_id, run_id=run_id, uri=settings.uri)


def _import_mlflow() -> None:
    import logging

    # MLflow reads these from the environment only; the user's own values stand. Its seven retries would hold
    # one call for 246 s, and the thread has a back-off of its own. A training job reports to nobody but its
    # user.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    import mlflow.tracking  # noqa: F401

    # Lines on schema steps and retries would break the progress bar; failures are counted and said by the
    # thread.
    for name in ("mlflow", "alembic", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _open_run(client: Any, experiment_id: str, *, state: RunState, name: str, tags: Mapping[str, str], say: Say) -> str:
    """The id of the state's run, now RUNNING: by its id, else by its key, else a new run."""
    from mlflow.exceptions import MlflowException

    run = None
    if state.run_id is not None:
        try:
            run = client.get_run(state.run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        if run is None or run.info.lifecycle_stage == "deleted":
            say(f"MLflow: run {state.run_id} ({name}) is not in this store: a new one is filled from the start")
            run, state.run_id, state.sent = None, None, SentMark()
    if run is None:
        found = client.search_runs([experiment_id], f"tags.`shardvit.key` = '{state.key}'")
        run = found[-1] if found else None
    if run is None:
        run = client.create_run(experiment_id, run_name=name, tags={"shardvit.key": state.key, **tags})
    else:
        for tag, value in tags.items():
            client.set_tag(run.info.run_id, tag, value)
        client.update_run(run.info.run_id, status="RUNNING")
    state.run_id = str(run.info.run_id)
    _save(state, say=say)
    return state.run_id


def _load(file: Path, *, say: Say) -> RunState:
    try:
        return load_run_state(file)
    except (OSError, ValueError) as error:
        say(f"MLflow: a new run is begun, for {file} cannot be read: {error}")
        return RunState(file)


def _save(state: RunState, *, say: Say) -> None:
    try:
        state.save()
    except FileNotFoundError:  # the run folder is gone, which is said elsewhere
        return
    except OSError as error:
        say(f"MLflow: cannot write {state.file}, a resumed stage may begin a new run: {error}")

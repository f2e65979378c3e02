"""MLflow: one run per pipeline, a child run per stage. The only file that imports mlflow.

`Tracker.log` writes a row to RUNS/NAME/STAGE/metrics.jsonl and returns. A daemon thread does everything that MLflow
does, importing it (2 to 4 s) and making an SQLite schema (2 to 6 s) included: it follows that file and sends what is
new every few seconds. So training neither waits for a slow server nor stops for a dead one, no outage fills the
memory, and points that an outage or a kill kept back are sent when the server returns or the stage is opened again.

STAGE/mlflow.json keeps the run id, the attempt and the last step that the store confirmed; NAME/mlflow.json the parent's
id. A key, kept there before the run exists and put on the run as a tag, finds the run again when a kill or a
lost answer came between its making and the writing of its id: no run is made twice.

A rollback repeats steps. Those that MLflow already has get a second point at the same step (MLflow cannot delete
points; the later timestamp counts, and the tag shardvit.attempt.N says from which step attempt N went on), while
metrics.jsonl holds each step once. Exact duplicates (same step, time and value) collapse in MLflow.
MLflow stores an infinity as 1.8e308.

Costs one row's write (tens of microseconds) per `log` in the training thread. It does not draw, thin out or name metrics, and
jobs other than points (artifacts, tags, statuses) that were never sent are lost with the process.
"""

from __future__ import annotations

import functools
import getpass
import json
import os
import re
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline.metrics_log import MetricRow, open_metrics_log, read_metrics_tail

FinalStatus = Literal["FINISHED", "FAILED", "KILLED"]
Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]
Say = Callable[[str], None]

_MAX_METRICS_PER_BATCH = 1000  # mlflow.utils.validation.MAX_METRICS_PER_BATCH
_MAX_PARAMS_PER_BATCH = 100  # mlflow.utils.validation.MAX_PARAMS_TAGS_PER_BATCH
_MAX_PARAM_LENGTH = 6000  # mlflow.utils.validation.MAX_PARAM_VAL_LENGTH
_MAX_DIGEST_LENGTH = 36  # the column `digest` of MLflow's table `datasets`
_MAX_WAITING_JOBS = 1000
_TRIES_PER_JOB = 3
_TRIES_AT_CLOSE = 3
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0

# A process forked while another thread imports a module keeps that module locked for ever. Data loader workers are
# forked, so a fork waits until the import of mlflow, once per process, is over.
_import_lock = threading.RLock()
os.register_at_fork(
    before=_import_lock.acquire,
    after_in_parent=_import_lock.release,
    after_in_child=_import_lock.release,
)


@dataclass(frozen=True)
class DatasetInput:
    """A data set as MLflow shows it: `digest` at most 36 characters, `context` such as train or eval."""

    name: str
    source: str
    digest: str
    context: str

    def __post_init__(self) -> None:
        if len(self.digest) > _MAX_DIGEST_LENGTH:
            raise ValueError(
                f"digest of data set {self.name} is longer than {_MAX_DIGEST_LENGTH} characters"
            )


@dataclass(frozen=True, kw_only=True)
class TrackerSettings:
    """What one attempt at one stage tells MLflow.

    `tags` are the facts of this attempt (job id, world size, host); `params` are those of the recipe, flat and dotted.
    `resume_step` is the last step done before this attempt, -1 for a stage that starts from nothing.
    `tracking_uri` None means sqlite:///{runs_root}/mlflow.db with artifacts in {runs_root}/mlartifacts.
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


class NullTracker:
    """The interface of a tracker, doing nothing: for ranks above 0."""

    @property
    def failures(self) -> int:
        """Calls that failed so far (each attempt counts); training went on."""
        return 0

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the stage's run, None before it is known."""
        return None

    def log(self, step: int, images_seen: int, metrics: Mapping[str, float]) -> None:
        """Record values at a step: in metrics.jsonl at once, in MLflow within seconds. Never raises OSError."""

    def log_summary(self, metrics: Mapping[str, float]) -> None:
        """Record final values, at the last logged step."""

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Send a file soon; it must stay where it is until `close`."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags on the stage's run."""

    def set_parent_status(self, status: Status) -> None:
        """Set the status of the pipeline's run."""

    def wait_connected(self, timeout_seconds: float) -> bool:
        """Wait until the run is open in the store; False when it is not (yet)."""
        return False

    def close(
        self, status: FinalStatus, *, finish_parent: FinalStatus | None = None
    ) -> None:
        """Send what is left, within `close_timeout_seconds`, and set the status of the run (and of its parent)."""


class FileTracker(NullTracker):
    """metrics.jsonl only: mode off, and the part of `MlflowTracker` that runs in the training thread."""

    def __init__(self, settings: TrackerSettings, *, say: Say) -> None:
        self._say = say
        self._said: set[str] = set()
        self._failures = 0
        self._last = (max(settings.resume_step, 0), 0)
        self.metrics_file = settings.run_dir / settings.stage / "metrics.jsonl"
        self._metrics_log = open_metrics_log(
            self.metrics_file, resume_step=settings.resume_step
        )
        if self._metrics_log.dropped_broken_rows:
            self._once(
                "broken",
                f"{self.metrics_file}: dropped {self._metrics_log.dropped_broken_rows} broken row(s)",
            )

    @property
    def failures(self) -> int:
        return self._failures

    def log(self, step: int, images_seen: int, metrics: Mapping[str, float]) -> None:
        try:
            self._metrics_log.append(
                step=step, images_seen=images_seen, metrics=metrics
            )
        except OSError as error:
            self._count_failure(
                "file", f"cannot write {self.metrics_file}, training goes on: {error}"
            )
        self._last = (step, images_seen)

    def log_summary(self, metrics: Mapping[str, float]) -> None:
        step, images_seen = self._last
        self.log(step, images_seen, metrics)

    def close(
        self, status: FinalStatus, *, finish_parent: FinalStatus | None = None
    ) -> None:
        self._metrics_log.close()

    def _count_failure(self, kind: str, text: str) -> None:
        self._failures += 1
        self._once(kind, text)

    def _once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(_without_credentials(" ".join(text.split())))


@dataclass
class _Job:
    name: str
    call: Callable[[_Store], None]
    tries: int = 0


class MlflowTracker(FileTracker):
    """metrics.jsonl, and a thread that brings it to MLflow. Made by `open_tracker`."""

    def __init__(self, settings: TrackerSettings, *, say: Say) -> None:
        super().__init__(settings, say=say)
        self._settings = settings
        self._parent = self._load_state(settings.run_dir / "mlflow.json")
        self._child = self._load_state(
            settings.run_dir / settings.stage / "mlflow.json"
        )
        self._child.attempt += 1
        self._child.sent_step = min(self._child.sent_step, settings.resume_step)
        self._save(self._child)
        self._save(self._parent)
        self._offset_bytes = 0
        self._jobs: deque[_Job] = deque()
        self._store: _Store | None = None
        self._connected = threading.Event()
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._run, name="mlflow", daemon=True)
        self._thread.start()

    @property
    def run_id(self) -> str | None:
        return self._child.run_id if self._connected.is_set() else None

    def log_artifact(self, path: Path, folder: str = "") -> None:
        self._add_job(
            f"artifact {path.name}", lambda store: store.log_artifact(path, folder)
        )

    def set_tags(self, tags: Mapping[str, str]) -> None:
        kept = dict(tags)
        self._add_job("tags", lambda store: store.log_tags(kept))

    def set_parent_status(self, status: Status) -> None:
        self._add_job(
            "parent status", lambda store: store.set_status(store.parent_id, status)
        )

    def wait_connected(self, timeout_seconds: float) -> bool:
        return self._connected.wait(timeout_seconds)

    def close(
        self, status: FinalStatus, *, finish_parent: FinalStatus | None = None
    ) -> None:
        if self._closing.is_set():
            return
        super().close(status)
        self._add_job("status", lambda store: store.finish(status))
        if finish_parent is not None:
            self._add_job(
                "parent status",
                lambda store: store.set_status(store.parent_id, finish_parent),
            )
        self._deadline = time.monotonic() + self._settings.close_timeout_seconds
        self._closing.set()
        self._thread.join(self._settings.close_timeout_seconds)
        points, jobs = self._unsent_points(), len(self._jobs)
        if points or jobs:
            what = f"{points} point(s) and {jobs} other call(s) of stage {self._settings.stage}"
            kept = f"the points are kept in {self.metrics_file} and sent when the stage is opened again"
            self._once("unsent", f"MLflow: {what} were not sent; {kept}")

    # What follows runs in the daemon thread, apart from _add_job, _load_state, _save and _unsent_points.

    def _run(self) -> None:
        pause, tries_at_close = _FIRST_PAUSE_SECONDS, 0
        while True:
            closing = (
                self._closing.is_set()
            )  # read before the work, so the last round sees the last row
            wait = self._settings.flush_seconds
            try:
                self._work_once()
                pause = _FIRST_PAUSE_SECONDS
                if closing:
                    return
            except Exception as error:
                kept = "training goes on, metrics.jsonl keeps every value, MLflow is tried again"
                self._count_failure(
                    "outage",
                    f"MLflow: {type(error).__name__}: {str(error)[:300]} ({kept})",
                )
                tries_at_close += closing
                if (
                    tries_at_close >= _TRIES_AT_CLOSE
                    or time.monotonic() > self._deadline
                ):
                    return
                wait = min(pause, _FIRST_PAUSE_SECONDS) if closing else pause
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if closing:
                time.sleep(wait)
            else:
                self._closing.wait(wait)

    def _work_once(self) -> None:
        if self._store is None:
            with _import_lock:
                client = _make_client(self._settings)
            store = _open_store(
                client, self._settings, self._parent, self._child, self._save, self._say
            )
            self._jobs.extendleft(
                reversed(_describing_jobs(self._settings, self._child))
            )
            self._store = store
            self._connected.set()
        self._send_rows(self._store)
        while self._jobs:
            self._do_job(self._store, self._jobs[0])
            self._jobs.popleft()

    def _send_rows(self, store: _Store) -> None:
        while True:
            tail = read_metrics_tail(
                self.metrics_file, offset_bytes=self._offset_bytes, max_rows=200
            )
            if tail.end_offset_bytes == self._offset_bytes:
                return
            # The row at sent_step itself goes again: a step may have several rows, and duplicates collapse.
            rows = [row for row in tail.rows if row.step >= self._child.sent_step]
            points = [point for row in rows for point in store.points(row)]
            for start in range(0, len(points), _MAX_METRICS_PER_BATCH):
                for refused, error in store.send(
                    points[start : start + _MAX_METRICS_PER_BATCH]
                ):
                    self._count_failure(
                        f"metric {refused}",
                        f"MLflow refuses metric {refused!r}: {error}",
                    )
            self._offset_bytes = tail.end_offset_bytes
            if rows:
                self._child.sent_step = rows[-1].step
                self._save(self._child)

    def _do_job(self, store: _Store, job: _Job) -> None:
        try:
            job.call(store)
        except Exception as error:
            # The store answers, so it is this call that is wrong: three tries, then the next one's turn.
            if not store.answers():
                raise
            job.tries += 1
            if job.tries < _TRIES_PER_JOB:
                raise
            self._count_failure(
                f"job {job.name}", f"MLflow: {job.name} given up: {error}"
            )

    def _add_job(self, name: str, call: Callable[[_Store], None]) -> None:
        if len(self._jobs) >= _MAX_WAITING_JOBS:
            self._count_failure(
                "full",
                f"MLflow: {_MAX_WAITING_JOBS} calls are waiting, {name} is left out",
            )
        else:
            self._jobs.append(_Job(name, call))

    def _unsent_points(self) -> int:
        tail = read_metrics_tail(self.metrics_file, offset_bytes=self._offset_bytes)
        first = self._child.sent_step + (self._offset_bytes == 0)
        return sum(len(row.metrics) for row in tail.rows if row.step >= first)

    def _load_state(self, file: Path) -> _RunState:
        try:
            return _RunState(file=file, **json.loads(file.read_text()))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError) as error:
            self._count_failure(
                f"state {file}",
                f"{file} cannot be read, a new MLflow run is begun: {error}",
            )
        return _RunState(file=file, key=uuid.uuid4().hex)

    def _save(self, state: _RunState) -> None:
        values = {
            name: value for name, value in asdict(state).items() if name != "file"
        }
        beside = state.file.with_name(state.file.name + ".partial")
        try:
            state.file.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(values) + "\n")
            os.replace(beside, state.file)
        except OSError as error:
            self._count_failure("state", f"cannot write {state.file}: {error}")


Tracker = NullTracker


def open_tracker(settings: TrackerSettings, *, say: Say | None = None) -> Tracker:
    """Open the tracker of one stage, on rank 0 only; returns at once, MLflow opens in the background.

    It opens metrics.jsonl too, dropping the rows after `resume_step`, in mode off as well. `say` prints one line
    (`Progress.note` fits; it is called from the thread); the default prints on stderr.
    """
    tracker = MlflowTracker if settings.mode == "mlflow" else FileTracker
    return tracker(
        settings, say=say or functools.partial(print, file=sys.stderr, flush=True)
    )


@dataclass
class _RunState:
    """mlflow.json of a run. `sent_step` is the last step that the store confirmed."""

    file: Path
    key: str
    run_id: str | None = None
    attempt: int = 0
    sent_step: int = -1


class _Store:
    """The calls on one open stage run. All of them may raise whatever MLflow raises."""

    def __init__(
        self, client: Any, *, parent_id: str, run_id: str, monitor: Any
    ) -> None:
        self.client = client
        self.parent_id = parent_id
        self.run_id = run_id
        self._monitor = monitor

    def answers(self) -> bool:
        try:
            self.client.get_run(self.run_id)
        except Exception:
            return False
        return True

    def points(self, row: MetricRow) -> list[Any]:
        from mlflow.entities import Metric

        values = {**row.metrics, "images_seen": row.images_seen}
        return [
            Metric(name, value, int(row.time * 1000), row.step)
            for name, value in values.items()
        ]

    def send(self, points: list[Any]) -> list[tuple[str, Exception]]:
        """Send points; those that a living store refuses come back with the reason, the others are in."""
        try:
            self.client.log_batch(self.run_id, metrics=points, synchronous=True)
        except Exception as error:
            if not self.answers():
                raise
            if len(points) == 1:
                return [(points[0].key, error)]
            half = len(points) // 2
            return self.send(points[:half]) + self.send(points[half:])
        return []

    def log_tags(self, tags: Mapping[str, str], *, run_id: str | None = None) -> None:
        from mlflow.entities import RunTag

        entities = [
            RunTag(name, _without_credentials(value)) for name, value in tags.items()
        ]
        self.client.log_batch(run_id or self.run_id, tags=entities, synchronous=True)

    def log_params(self, params: Mapping[str, str], *, attempt: int) -> None:
        """Params are write-once: changed ones keep their first value, and a tag tells the change."""
        from mlflow.entities import Param

        clean = {
            name: _without_credentials(value)[:_MAX_PARAM_LENGTH]
            for name, value in params.items()
        }
        known = self.client.get_run(self.run_id).data.params
        new = [Param(name, value) for name, value in clean.items() if name not in known]
        for start in range(0, len(new), _MAX_PARAMS_PER_BATCH):
            self.client.log_batch(
                self.run_id,
                params=new[start : start + _MAX_PARAMS_PER_BATCH],
                synchronous=True,
            )
        changed = [
            f"{n}: {known[n]} -> {v}" for n, v in clean.items() if known.get(n, v) != v
        ]
        if changed:
            self.log_tags({f"shardvit.params_changed.{attempt}": "; ".join(changed)})

    def log_datasets(self, datasets: Sequence[DatasetInput]) -> None:
        from mlflow import entities

        inputs = [
            entities.DatasetInput(
                entities.Dataset(
                    d.name,
                    d.digest,
                    "local",
                    json.dumps({"uri": _without_credentials(d.source)}),
                ),
                [entities.InputTag("mlflow.data.context", d.context)],
            )
            for d in datasets
        ]
        self.client.log_inputs(self.run_id, datasets=inputs)

    def log_artifact(
        self, path: Path, folder: str, *, run_id: str | None = None
    ) -> None:
        self.client.log_artifact(run_id or self.run_id, str(path), folder or None)

    def set_status(self, run_id: str, status: Status) -> None:
        if status == "RUNNING":
            self.client.update_run(run_id, status=status)
        else:
            self.client.set_terminated(run_id, status=status)

    def finish(self, status: FinalStatus) -> None:
        if self._monitor is not None:
            self._monitor.finish()
        self.set_status(self.run_id, status)


def _tracking_uri(settings: TrackerSettings) -> str:
    return (
        settings.tracking_uri
        or f"sqlite:///{settings.runs_root.absolute() / 'mlflow.db'}"
    )


def _make_client(settings: TrackerSettings) -> Any:
    """Import MLflow, quietly, and make a client. A wrong address is not noticed yet."""
    import logging

    # MLflow reads these from the environment only. Seven retries hold one call for 246 s, when the thread's own
    # back-off does as well; the user's own values stand. A training job reports to nobody but its user.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    from mlflow.tracking import MlflowClient

    # Their lines would break the progress bar, and tell of retries and schema steps that are counted here.
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    settings.runs_root.mkdir(parents=True, exist_ok=True)
    return MlflowClient(tracking_uri=_tracking_uri(settings))


def _open_store(
    client: Any,
    settings: TrackerSettings,
    parent: _RunState,
    child: _RunState,
    save: Callable[[_RunState], None],
    say: Say,
) -> _Store:
    """Find or make the experiment, the parent run and the stage's run; the ids are saved as soon as they are known."""
    name = settings.experiment or "shardvit"
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        local = _tracking_uri(settings).startswith("sqlite:")
        location = (
            (settings.runs_root.absolute() / "mlartifacts").as_uri() if local else None
        )
        experiment_id = client.create_experiment(name, artifact_location=location)
    else:
        experiment_id = experiment.experiment_id
    parent_id = _open_run(
        client, experiment_id, parent, settings.pipeline, {}, save=save, say=say
    )
    tags = {"mlflow.parentRunId": parent_id}
    run_name = f"{settings.stage}-{settings.pipeline}"
    run_id = _open_run(client, experiment_id, child, run_name, tags, save=save, say=say)
    monitor = None
    if settings.system_metrics == "on":
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        monitor = SystemMetricsMonitor(
            run_id, resume_logging=True, tracking_uri=_tracking_uri(settings)
        )
        monitor.start()
    return _Store(client, parent_id=parent_id, run_id=run_id, monitor=monitor)


def _open_run(
    client: Any,
    experiment_id: str,
    state: _RunState,
    name: str,
    tags: Mapping[str, str],
    *,
    save: Callable[[_RunState], None],
    say: Say,
) -> str:
    """The id of the state's run, set RUNNING: by its id, else by its key, else a new run."""
    from mlflow.exceptions import MlflowException

    run = None
    if state.run_id is not None:
        try:
            run = client.get_run(state.run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        if run is None or run.info.lifecycle_stage == "deleted":
            say(
                f"MLflow: run {state.run_id} ({name}) is not in this store; a new run is begun and filled from step 0"
            )
            run, state.run_id, state.sent_step = None, None, -1
    if run is None:
        found = client.search_runs(
            [experiment_id], f"tags.`shardvit.key` = '{state.key}'"
        )
        run = found[-1] if found else None
    if run is None:
        run = client.create_run(
            experiment_id, run_name=name, tags={"shardvit.key": state.key, **tags}
        )
    else:
        for tag, value in tags.items():
            client.set_tag(run.info.run_id, tag, value)
        client.update_run(run.info.run_id, status="RUNNING")
    state.run_id = str(run.info.run_id)
    save(state)
    return state.run_id


def _describing_jobs(settings: TrackerSettings, child: _RunState) -> list[_Job]:
    """What every attempt tells the store at its beginning."""
    attempt = child.attempt
    facts = " ".join(f"{name}={value}" for name, value in settings.tags.items())
    from_step = f"from_step={settings.resume_step}"
    tags = {
        **_source_tags(),
        **settings.tags,
        "shardvit.stage": settings.stage,
        "shardvit.attempt": str(attempt),
        f"shardvit.attempt.{attempt}": f"{from_step} {facts}".strip(),
    }
    jobs = [
        _Job("tags", lambda store: store.log_tags(tags)),
        _Job(
            "tags of the pipeline",
            lambda store: store.log_tags(_source_tags(), run_id=store.parent_id),
        ),
    ]
    if settings.params:
        jobs.append(
            _Job(
                "params",
                lambda store: store.log_params(settings.params, attempt=attempt),
            )
        )
    if settings.datasets:
        jobs.append(
            _Job("data sets", lambda store: store.log_datasets(settings.datasets))
        )
    recipe = settings.recipe_file
    if recipe is not None:
        jobs.append(_Job("recipe", lambda store: store.log_artifact(recipe, "")))
        jobs.append(
            _Job(
                "recipe of the pipeline",
                lambda s: s.log_artifact(recipe, "", run_id=s.parent_id),
            ),
        )
    return jobs


@functools.cache
def _source_tags() -> dict[str, str]:
    # Only the program's name: its arguments may hold a URL with a password.
    tags = {"mlflow.source.name": Path(sys.argv[0]).name, "mlflow.source.type": "LOCAL"}
    try:
        tags["mlflow.user"] = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user without a name
        pass
    return tags | git_tags(Path(__file__))


def git_tags(source_file: Path) -> dict[str, str]:
    """Commit, branch and whether files differ, of the repository that tracks `source_file`; {} when none does.

    A package installed into somebody's repository is not tracked by it, so that one's commit is not taken.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source_file.parent), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "--", source_file.name)
        return {
            "mlflow.source.git.commit": git("rev-parse", "HEAD"),
            "mlflow.source.git.branch": git("rev-parse", "--abbrev-ref", "HEAD"),
            "shardvit.git.dirty": "true"
            if git("status", "--porcelain", "--untracked-files=no")
            else "false",
        }
    except (OSError, subprocess.SubprocessError):
        return {}


def _without_credentials(text: str) -> str:
    """The text with user:password@ taken out of URLs."""
    return re.sub(r"(\w+://)[^/\s@]+@", r"\1***@", text)

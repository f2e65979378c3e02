"""Send to MLflow: a run per pipeline with a child run per stage; a sweep's run is the parent of its points' runs.

    images/...              PNG by key and step, for MLflow's image grid with its step slider
    figures/NAME.svg        the newest of each
    tables/NAME/step-....json

MLflow cannot delete points: steps repeated after a rollback have two (the later timestamp counts; tag
shardvit.attempt.N has the step where attempt N began). Exact duplicates (step, time, value) collapse. MLflow stores
infinity as 1.8e308, NaN as NaN.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardvit.pipeline.runs.logs import MetricRow
from shardvit.pipeline.runs.pictures import KeptPicture
from shardvit.pipeline.tracking.client import MODEL_TRAINING, open_client
from shardvit.pipeline.tracking.facts import DatasetInput, RunFacts, RunState, without_credentials
from shardvit.pipeline.tracking.sinks.sink import ResultModel, RunKind, Sink, values_of

# From mlflow.utils.validation; the digest's from MLflow's table `datasets`.
_MAX_METRICS_PER_BATCH = 1_000
_MAX_PARAMS_PER_BATCH = 100
_MAX_PARAM_CHARACTERS = 6_000
_MAX_TAG_CHARACTERS = 5_000  # the limit of every MLflow version
_MAX_DIGEST_CHARACTERS = 36
_MAX_NAME_CHARACTERS = 500


class MlflowSink(Sink):
    """`sink.Sink` for the MLflow store at `uri`; `home` is the folder of all runs."""

    name, title, takes = "mlflow", "MLflow", frozenset({"files", "model", "sweep"})

    def __init__(self, uri: str, *, home: Path, experiment: str) -> None:
        self.place = without_credentials(uri)
        self._uri, self._home, self._experiment = uri, home, experiment
        self._client: Any = None
        self._experiment_id = ""
        self._there: dict[str, set[str]] = {}  # what earlier processes sent, by run

    def connect(self) -> None:
        self._client, self._experiment_id = open_client(self._uri, home=self._home, experiment=self._experiment)

    def open(self, known: RunState, *, kind: RunKind, name: str, parent_id: str | None, begun_ms: int | None) -> str:
        run = None if known.run_id is None else run_or_none(self._client, known.run_id)
        if run is not None and (
            run.info.lifecycle_stage == "deleted" or run.data.tags.get("shardvit.key") != known.key
        ):
            run = None
        if run is None:
            found = self._client.search_runs([self._experiment_id], f"tags.`shardvit.key` = '{known.key}'")
            run = found[-1] if found else None
        parent = {} if parent_id is None else {"mlflow.parentRunId": parent_id}
        if run is None:
            tags = {"shardvit.key": known.key, **parent}
            run = self._client.create_run(self._experiment_id, start_time=begun_ms, run_name=name, tags=tags)
        elif run.data.tags.get("mlflow.parentRunId") != parent_id is not None:
            self._client.set_tag(run.info.run_id, "mlflow.parentRunId", parent_id)
        return str(run.info.run_id)

    def address(self, run_id: str) -> str | None:
        if not self._uri.startswith("http"):
            return None
        return f"{self.place.rstrip('/')}/#/experiments/{self._experiment_id}/runs/{run_id}?{MODEL_TRAINING}"

    def answers(self, run_id: str) -> bool:
        try:
            self._client.get_run(run_id)
        except Exception:  # noqa: BLE001  (any failure means no answer)
            return False
        return True

    def params(self, run_id: str, facts: RunFacts) -> None:
        log_facts(self._client, run_id, facts)

    def metrics(self, run_id: str, rows: Sequence[MetricRow]) -> list[str]:
        from mlflow.entities import Metric

        points = [
            Metric(name, value, int(row.time * 1000), row.step)
            for row in rows
            for name, value in values_of(row).items()
        ]
        batches = _batches(points, _MAX_METRICS_PER_BATCH)
        return [refusal for batch in batches for refusal in self._send_points(run_id, batch)]

    def _send_points(self, run_id: str, points: list[Any]) -> list[str]:
        # Halve a batch that a live store refuses until the bad points are isolated.
        try:
            self._client.log_batch(run_id, metrics=points, synchronous=True)
        except Exception as error:
            if not self.answers(run_id):
                raise
            if len(points) == 1:
                return [f"{points[0].key}: {error}"]
            half = len(points) // 2
            return self._send_points(run_id, points[:half]) + self._send_points(run_id, points[half:])
        return []

    def file(self, run_id: str, path: Path) -> None:
        self._client.log_artifact(run_id, str(path))

    def picture(self, run_id: str, picture: KeptPicture, *, is_newest: bool) -> None:
        from PIL import Image

        there, words = self._artifacts(run_id), picture.picture
        if picture.table is not None:
            path = f"tables/{words.name}/{picture.words.name}"
            if path not in there:  # MLflow would append the rows again
                self._client.log_table(run_id, {name: list(each) for name, each in picture.table.items()}, path)
            return
        assert picture.png is not None and picture.svg is not None
        # MLflow's file name up to the timestamp; its separators differ between versions.
        begin = rf"images/{words.group}[#~]{words.name}[+%]step[+%]{picture.step}[+%]"
        if not any(re.match(begin, path) and path.endswith(".png") for path in there):
            with Image.open(picture.png) as image:
                image.load()
                at, key = int(picture.words.stat().st_mtime * 1000), f"{words.group}/{words.name}"
                self._client.log_image(run_id, image, key=key, step=picture.step, timestamp=at, synchronous=True)
        if is_newest:
            self._client.log_text(run_id, picture.svg.read_text(encoding="utf-8"), f"figures/{words.name}.svg")

    def _artifacts(self, run_id: str) -> set[str]:
        """List pictures and tables already sent; a kill may have left them out of mlflow.json."""
        if run_id not in self._there:
            names = [each for folder in ("images", "tables") for each in self._client.list_artifacts(run_id, folder)]
            self._there[run_id] = {
                file.path
                for each in names
                for file in (self._client.list_artifacts(run_id, each.path) if each.is_dir else [each])
            }
        return self._there[run_id]

    def model(self, result: ResultModel) -> str:
        from shardvit.pipeline.tracking.sinks.logged_model import log_result_model

        return log_result_model(self._client, uri=self._uri, result=result)

    def close(self, run_id: str, facts: RunFacts) -> None:
        if facts.status == "RUNNING":
            self._client.update_run(run_id, status=facts.status)
        else:
            self._client.set_terminated(run_id, status=facts.status, end_time=facts.ended_ms)


def run_or_none(client: Any, run_id: str) -> Any:
    """Fetch a run; None if the store does not have it."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):  # the latter: malformed id
            raise
        return None


def log_facts(client: Any, run_id: str, facts: RunFacts) -> None:
    """Send name, description, tags, params, data sets and results in batches within MLflow's limits. MLflow params are
    immutable: a changed one keeps its first value, and a tag says "old -> new"."""
    from mlflow.entities import Metric, Param, RunTag

    params = {name: without_credentials(value)[:_MAX_PARAM_CHARACTERS] for name, value in facts.params.items()}
    known = client.get_run(run_id).data.params
    changed = [f"{name}: {known[name]} -> {now}" for name, now in params.items() if known.get(name, now) != now]
    tags = {"mlflow.runName": facts.name, "mlflow.note.content": facts.description, **facts.tags}
    if changed:
        tags[f"shardvit.params_changed.{len(facts.kept_rows)}"] = "; ".join(changed)
    shown = {name: without_credentials(value)[:_MAX_TAG_CHARACTERS] for name, value in tags.items() if value}
    client.log_batch(run_id, tags=[RunTag(*tag) for tag in shown.items()], synchronous=True)
    new = [Param(*param) for param in params.items() if param[0] not in known]
    for batch in _batches(new, _MAX_PARAMS_PER_BATCH):
        client.log_batch(run_id, params=batch, synchronous=True)
    if facts.datasets:
        log_datasets(client, run_id, facts.datasets)
    points = [Metric(name, value, at, 0) for name, (value, at) in facts.results.items()]
    for batch in _batches(points, _MAX_METRICS_PER_BATCH):
        client.log_batch(run_id, metrics=batch, synchronous=True)


def _batches(items: Sequence[Any], size: int) -> list[list[Any]]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def log_datasets(client: Any, run_id: str, datasets: Sequence[DatasetInput]) -> None:
    """Send a run's data sets; appends the digest to the name of a second, different set of the same name."""
    from mlflow import entities

    inputs = []
    first: dict[str, str] = {}
    for one in datasets:
        source = json.dumps({"uri": without_credentials(one.source)})
        is_first = first.setdefault(one.name, one.digest) == one.digest
        name = (one.name if is_first else f"{one.name}-{one.digest[:8]}")[:_MAX_NAME_CHARACTERS]
        counts = {"num_rows": one.images, "num_classes": one.classes}
        profile = json.dumps({key: count for key, count in counts.items() if count is not None})
        dataset = entities.Dataset(name, one.digest[:_MAX_DIGEST_CHARACTERS], "local", source, profile=profile)
        inputs.append(entities.DatasetInput(dataset, [entities.InputTag("mlflow.data.context", one.context)]))
    client.log_inputs(run_id, datasets=inputs)

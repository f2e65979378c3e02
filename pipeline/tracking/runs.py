"""What an MLflow run is told, within MLflow's limits: metrics, params, tags, data sets. The run's id is known.

Each function makes one or a few synchronous calls, and raises whatever MLflow does. No text with a password leaves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.tracking.facts import DatasetInput, RunFacts, now_ms
from pipeline.tracking.tracking_thread import without_credentials

# From mlflow.utils.validation, and the column `digest` of MLflow's table `datasets`.
_MAX_METRICS_PER_BATCH = 1_000
_MAX_PARAMS_PER_BATCH = 100
_MAX_PARAM_CHARACTERS = 6_000
_MAX_TAG_CHARACTERS = 5_000  # in any MLflow
_MAX_DIGEST_CHARACTERS = 36
_MAX_NAME_CHARACTERS = 500


def log_points(client: Any, run_id: str, points: Sequence[Any]) -> None:
    """Send MLflow metrics, as many calls as it needs."""
    for start in range(0, len(points), _MAX_METRICS_PER_BATCH):
        client.log_batch(run_id, metrics=list(points[start : start + _MAX_METRICS_PER_BATCH]), synchronous=True)


def log_metrics(client: Any, run_id: str, metrics: Mapping[str, float]) -> None:
    """Send values of this moment."""
    from mlflow.entities import Metric

    now = now_ms()
    log_points(client, run_id, [Metric(name, value, now, 0) for name, value in metrics.items()])


def log_new_params(client: Any, run_id: str, params: Mapping[str, str]) -> dict[str, str]:
    """Params are write-once: send those that the run lacks; returns "old -> new" of those that it has with another
    value."""
    from mlflow.entities import Param

    clean = {name: without_credentials(value)[:_MAX_PARAM_CHARACTERS] for name, value in params.items()}
    known = client.get_run(run_id).data.params
    new = [Param(name, value) for name, value in clean.items() if name not in known]
    for start in range(0, len(new), _MAX_PARAMS_PER_BATCH):
        client.log_batch(run_id, params=new[start : start + _MAX_PARAMS_PER_BATCH], synchronous=True)
    return {name: f"{known[name]} -> {now}" for name, now in clean.items() if known.get(name, now) != now}


def set_tags(client: Any, run_id: str, tags: Mapping[str, str]) -> None:
    """Set or replace tags."""
    from mlflow.entities import RunTag

    entities = [RunTag(name, without_credentials(value)[:_MAX_TAG_CHARACTERS]) for name, value in tags.items()]
    client.log_batch(run_id, tags=entities, synchronous=True)


def log_datasets(client: Any, run_id: str, datasets: Sequence[DatasetInput]) -> None:
    """Name a run's data sets; the same one twice counts once, and another one of its name has its digest after it."""
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


def send_facts(client: Any, run_id: str, facts: RunFacts, *, attempt: int) -> None:
    """Bring a run up to date with its facts, but for files and status; what it knows already is not told twice."""
    from mlflow.entities import Metric

    tags = {"mlflow.runName": facts.name, "mlflow.note.content": facts.description, **facts.tags}
    set_tags(client, run_id, {name: value for name, value in tags.items() if value})
    changed = log_new_params(client, run_id, facts.params)
    if changed:  # a changed one keeps its first value, and a tag has the change
        text = "; ".join(f"{name}: {change}" for name, change in changed.items())
        set_tags(client, run_id, {f"shardvit.params_changed.{attempt}": text})
    if facts.datasets:
        log_datasets(client, run_id, facts.datasets)
    log_points(client, run_id, [Metric(name, one.value, one.time_ms, 0) for name, one in facts.metrics.items()])

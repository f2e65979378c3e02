"""A sweep's own run, the parent of its pipelines' runs: brought up to date as a whole, whenever something is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.recipe.vocabulary import MLFLOW_FILE
from pipeline.runs.written_by import source_tags
from pipeline.tracking.client import open_client, store_uri
from pipeline.tracking.runs import log_metrics, set_tags
from pipeline.tracking.tracking_state import load_run_state
from pipeline.tracking.tracking_thread import FinalStatus


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
    tags = {"shardvit.key": state.key}
    run = found[-1] if found else client.create_run(experiment_id, run_name=news.folder.name, tags=tags)
    state.run_id = str(run.info.run_id)
    state.save()
    set_tags(client, state.run_id, {**source_tags(), **news.tags})
    log_metrics(client, state.run_id, news.metrics)
    for folder, values in news.points.items():
        point = load_run_state(folder / MLFLOW_FILE).run_id
        if point is not None:  # else MLflow was not told of it
            log_metrics(client, point, values)
    tell = client.update_run if news.status == "RUNNING" else client.set_terminated
    tell(state.run_id, status=news.status)

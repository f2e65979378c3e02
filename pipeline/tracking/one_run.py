"""A command's result as one MLflow run: `shardvit eval`, `fewshot`, `probe`, `knn` and `transfer` end with it.

The result stands in the terminal and in the command's file whatever becomes of MLflow: a store that does not take it
costs one line, and a silent one a minute at most. Takes 2 to 4 s for importing mlflow.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pipeline.recipe.vocabulary import MLFLOW_FILE
from pipeline.runs.run_folder import RunFolder
from pipeline.runs.written_by import source_tags
from pipeline.tracking.client import open_client, store_uri
from pipeline.tracking.runs import DatasetInput, log_datasets, log_metrics, log_new_params
from pipeline.tracking.settings import home_of
from pipeline.tracking.tracking_state import load_run_state
from pipeline.tracking.tracking_thread import without_credentials

ResultKind = Literal["eval", "fewshot", "probe", "knn", "transfer"]
RUNS_FOLDER = Path("runs")  # of a result that belongs to no run; the default of `shardvit run --runs`
_WAIT_SECONDS = 60.0


def log_result(
    name: str,
    *,
    kind: ResultKind,
    params: Mapping[str, object],
    metrics: Mapping[str, float],
    datasets: Sequence[DatasetInput] = (),
    files: Sequence[Path] = (),
    tables: Mapping[str, Mapping[str, Sequence[object]]] | None = None,
    of_run: RunFolder | None,
    tracking_uri: str | None,
    experiment: str | None,
    say: Callable[[str], None],
) -> None:
    """Make a finished MLflow run of a command's result; raises nothing, and says in one line what went wrong.

    Args:
        name: of the MLflow run, e.g. "eval-demo-imagenet-v2".
        kind: the command; the tag shardvit.kind has it.
        params: what the command was asked; None values are left out.
        metrics: named as METRICS of `pipeline.recipe.vocabulary` does; what is not finite is left out.
        datasets: what it was computed on.
        files: kept as artifacts.
        tables: columns by name, each shown as a table.
        of_run: the run whose model it was: the result is its child, in its experiment.
        tracking_uri: None: mlflow.db in the folder of all runs.
        experiment: None: the run's, or "shardvit".
        say: prints one line.
    """
    problem: list[str] = []

    def fill(client: Any, run_id: str) -> None:
        known = {key: str(value) for key, value in params.items() if value is not None}
        log_new_params(client, run_id, known)
        log_metrics(client, run_id, {key: each for key, each in metrics.items() if math.isfinite(each)})
        log_datasets(client, run_id, datasets)
        for file in files:
            client.log_artifact(run_id, str(file))
        for table, columns in (tables or {}).items():
            client.log_table(run_id, {key: list(values) for key, values in columns.items()}, f"tables/{table}.json")

    def send() -> None:
        try:
            _send(name, kind, fill, of_run=of_run, tracking_uri=tracking_uri, experiment=experiment)
        except Exception as error:  # noqa: BLE001  (the command has done its work)
            problem.append(f"{type(error).__name__}: {str(error)[:300]}")

    thread = threading.Thread(target=send, name="mlflow-result", daemon=True)
    thread.start()
    thread.join(_WAIT_SECONDS)
    if thread.is_alive():
        problem.append(f"no answer in {_WAIT_SECONDS:g} seconds")
    if problem:
        say(without_credentials(" ".join(f"MLflow did not take the result: {problem[0]}".split())))


def _send(
    name: str,
    kind: ResultKind,
    fill: Callable[[Any, str], None],
    *,
    of_run: RunFolder | None,
    tracking_uri: str | None,
    experiment: str | None,
) -> None:
    home = RUNS_FOLDER.absolute() if of_run is None else home_of(of_run)
    parent = None if of_run is None else load_run_state(of_run.path / MLFLOW_FILE).run_id
    client, experiment_id = open_client(
        store_uri(tracking_uri, home=home), home=home, experiment=experiment or "shardvit"
    )
    tags = {**source_tags(), "shardvit.kind": kind}
    if parent is not None:
        known = _run_or_none(client, parent)
        if known is not None:
            tags["mlflow.parentRunId"] = parent
            if experiment is None:
                experiment_id = known.info.experiment_id
    run_id = str(client.create_run(experiment_id, run_name=name, tags=tags).info.run_id)
    try:
        fill(client, run_id)
    except BaseException:
        client.set_terminated(run_id, status="FAILED")
        raise
    client.set_terminated(run_id, status="FINISHED")


def _run_or_none(client: Any, run_id: str) -> Any:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None

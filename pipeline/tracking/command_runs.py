"""Log a command's result as an MLflow run of its own: `shardvit eval`, `transfer`, and a whole sweep.

The result stands in the terminal and in the command's file whatever becomes of MLflow: a store that does not take it
costs one line, and a silent one a minute at most. Takes 2 to 4 s for importing mlflow.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline.recipe.vocabulary import MLFLOW_FILE
from pipeline.runs.run_folder import RunFolder
from pipeline.runs.written_by import source_tags
from pipeline.tracking.client import home_of, open_client, store_uri
from pipeline.tracking.facts import DatasetInput, RunStatus
from pipeline.tracking.mlflow_sink import log_datasets, log_metrics, log_new_params, run_or_none, set_tags
from pipeline.tracking.run_state import load_run_state, without_credentials

ResultKind = Literal["eval", "fewshot", "probe", "knn", "transfer"]
RUNS_FOLDER = Path("runs")  # of a result that belongs to no run; the default of `shardvit run --runs`
_WAIT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """A command's result.

    Attributes:
        name: of the MLflow run, e.g. "eval-demo-imagenet-v2".
        kind: the command; the tag shardvit.kind has it.
        params: what the command was asked; None values are left out.
        metrics: named as METRICS of `pipeline.recipe.vocabulary` does; what is not finite is left out.
        datasets: what it was computed on.
        files: kept as artifacts.
        tables: columns by name, each shown as a table.
        of_run: the run whose model it was: the result is its child, in its experiment.
    """

    name: str
    kind: ResultKind
    params: Mapping[str, object]
    metrics: Mapping[str, float]
    datasets: Sequence[DatasetInput] = ()
    files: Sequence[Path] = ()
    tables: Mapping[str, Mapping[str, Sequence[object]]] = field(default_factory=dict)
    of_run: RunFolder | None = None


def log_result(
    result: CommandResult, *, tracking_uri: str | None, experiment: str | None, say: Callable[[str], None]
) -> None:
    """Make a finished MLflow run of a command's result; raises nothing, and says in one line what went wrong.
    `tracking_uri` None: mlflow.db in the folder of all runs; `experiment` None: the run's, or "shardvit"."""
    _within_a_minute(
        lambda: _send_result(result, tracking_uri=tracking_uri, experiment=experiment),
        say=lambda why: say(f"MLflow did not take the result: {why}"),
    )


def _send_result(result: CommandResult, *, tracking_uri: str | None, experiment: str | None) -> None:
    home = RUNS_FOLDER.absolute() if result.of_run is None else home_of(result.of_run)
    parent = None if result.of_run is None else load_run_state(result.of_run.path / MLFLOW_FILE).run_id
    uri = store_uri(tracking_uri, home=home)
    client, experiment_id = open_client(uri, home=home, experiment=experiment or "shardvit")
    tags = {**source_tags(), "shardvit.kind": result.kind}
    if parent is not None and (known := run_or_none(client, parent)) is not None:
        tags["mlflow.parentRunId"] = parent
        if experiment is None:
            experiment_id = known.info.experiment_id
    run_id = str(client.create_run(experiment_id, run_name=result.name, tags=tags).info.run_id)
    try:
        _fill(client, run_id, result)
    except BaseException:
        client.set_terminated(run_id, status="FAILED")
        raise
    client.set_terminated(run_id, status="FINISHED")


def _fill(client: Any, run_id: str, result: CommandResult) -> None:
    log_new_params(client, run_id, {key: str(value) for key, value in result.params.items() if value is not None})
    log_metrics(client, run_id, {key: each for key, each in result.metrics.items() if math.isfinite(each)})
    log_datasets(client, run_id, result.datasets)
    for file in result.files:
        client.log_artifact(run_id, str(file))
    for table, columns in result.tables.items():
        client.log_table(run_id, {key: list(values) for key, values in columns.items()}, f"tables/{table}.json")


def log_sweep(
    folder: Path,
    *,
    tags: Mapping[str, str],
    metrics: Mapping[str, float],
    points: Mapping[Path, Mapping[str, float]],
    status: RunStatus,
    tracking_uri: str | None,
    experiment: str,
    say: Callable[[str], None],
) -> None:
    """Create or update the MLflow run of the sweep in `folder`, the parent of its pipelines' runs; raises nothing.
    Values are complete each time; `points`: metrics for the pipelines' runs, by folder. No params: MLflow never changes
    one, and a sweep's grid and share may change."""

    def send() -> None:
        state = load_run_state(folder / MLFLOW_FILE)
        state.save()  # its key, before there is a run
        home = folder.parent.absolute()
        client, experiment_id = open_client(store_uri(tracking_uri, home=home), home=home, experiment=experiment)
        key = {"shardvit.key": state.key}
        found = client.search_runs([experiment_id], f"tags.`shardvit.key` = '{state.key}'")
        run = found[-1] if found else client.create_run(experiment_id, run_name=folder.name, tags=key)
        state.run_id = str(run.info.run_id)
        state.save()
        set_tags(client, state.run_id, {**source_tags(), **tags})
        log_metrics(client, state.run_id, metrics)
        for point, values in points.items():
            if values and (run_id := load_run_state(point / MLFLOW_FILE).run_id):  # else MLflow has no run of it
                log_metrics(client, run_id, values)
        update = client.update_run if status == "RUNNING" else client.set_terminated
        update(state.run_id, status=status)

    _within_a_minute(send, say=lambda why: say(f"MLflow did not take the sweep {folder.name}: {why}"))


def _within_a_minute(task: Callable[[], None], *, say: Callable[[str], None]) -> None:
    """Do it in a thread that is left behind after a minute; says why it was not done."""
    problem: list[str] = []

    def work() -> None:
        try:
            task()
        except Exception as error:  # noqa: BLE001  (the command has done its work)
            problem.append(f"{type(error).__name__}: {str(error)[:300]}")

    thread = threading.Thread(target=work, name="mlflow", daemon=True)
    thread.start()
    thread.join(_WAIT_SECONDS)
    if thread.is_alive():
        problem.append(f"no answer in {_WAIT_SECONDS:g} seconds")
    if problem:
        say(without_credentials(" ".join(problem[0].split())))

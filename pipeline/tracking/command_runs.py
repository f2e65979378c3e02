"""Log a command's result as its own MLflow run: `shardvit eval`, `transfer`, and a whole sweep.

A failing store costs a printed line, an unresponsive one at most a minute. Importing mlflow takes 2 to 4 s.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.recipe.io import parse_recipe
from shardvit.pipeline.recipe.vocabulary import MLFLOW_FILE, RECIPE_FILE
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.runs.written_by import source_tags
from shardvit.pipeline.tracking.client import home_of, open_client, store_uri
from shardvit.pipeline.tracking.facts import (
    DatasetInput,
    RunFacts,
    RunStatus,
    load_run_state,
    now_ms,
    without_credentials,
)
from shardvit.pipeline.tracking.sinks.mlflow_sink import MlflowSink, log_facts, run_or_none

ResultKind = Literal["eval", "fewshot", "probe", "knn", "transfer"]
RUNS_FOLDER = Path("runs")  # for results without a run; the default of `shardvit run --runs`
_WAIT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """A result to log."""

    name: str  # of the MLflow run, e.g. "eval-demo-imagenet-v2"
    kind: ResultKind  # the tag shardvit.kind
    params: Mapping[str, object]  # the command's options; None values are dropped
    metrics: Mapping[str, float]  # named as in METRICS of `pipeline.recipe.vocabulary`; non-finite ones are dropped
    datasets: Sequence[DatasetInput] = ()
    files: Sequence[Path] = ()  # artifacts
    tables: Mapping[str, Mapping[str, Sequence[object]]] = field(default_factory=dict)  # columns by name
    of_run: RunFolder | None = None  # the model's run: the result becomes its child, in its experiment


def log_result(
    result: CommandResult, *, tracking_uri: str | None, experiment: str | None, say: Callable[[str], None]
) -> None:
    """Log a result as a finished MLflow run, unless the model's run is not sent to MLflow; never raises, prints one
    line on failure. The defaults are mlflow.db in the folder of all runs, and the experiment of that run or "shardvit".
    """
    _within_a_minute(
        lambda: _send_result(result, tracking_uri=tracking_uri, experiment=experiment),
        say=lambda why: say(f"MLflow did not take the result: {why}"),
    )


def _goes_to_mlflow(recipe: Path) -> bool:
    try:
        return "mlflow" in parse_recipe(recipe).tracking.to
    except UserError:  # the result is worth keeping whatever became of the run
        return True


def _send_result(result: CommandResult, *, tracking_uri: str | None, experiment: str | None) -> None:
    if result.of_run is not None and not _goes_to_mlflow(result.of_run.path / RECIPE_FILE):
        return
    home = RUNS_FOLDER.absolute() if result.of_run is None else home_of(result.of_run)
    parent = None if result.of_run is None else load_run_state(result.of_run.path / MLFLOW_FILE).run_id
    uri = store_uri(tracking_uri, home=home)
    client, experiment_id = open_client(uri, home=home, experiment=experiment or "shardvit")
    tags = {**source_tags(), "shardvit.kind": result.kind}
    if parent is not None and (known := run_or_none(client, parent)) is not None:
        tags["mlflow.parentRunId"] = parent
        if experiment is None:
            experiment_id = known.info.experiment_id
    facts = RunFacts(
        name=result.name,
        params={key: str(value) for key, value in result.params.items() if value is not None},
        datasets=tuple(result.datasets),
        results=_of_now({key: value for key, value in result.metrics.items() if math.isfinite(value)}),
    )
    run_id, status = str(client.create_run(experiment_id, run_name=result.name, tags=tags).info.run_id), "FAILED"
    try:
        log_facts(client, run_id, facts)
        for file in result.files:
            client.log_artifact(run_id, str(file))
        for table, columns in result.tables.items():
            client.log_table(run_id, {key: list(values) for key, values in columns.items()}, f"tables/{table}.json")
        status = "FINISHED"
    finally:
        client.set_terminated(run_id, status=status)


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
    """Create or update the MLflow run of the sweep in `folder`, the parent of its points' runs; never raises, prints
    one line on failure. `points` has metrics by run folder. Sends tags, not params: those are immutable in MLflow, but
    a sweep's grid and share may change."""

    def send() -> None:
        state = load_run_state(folder / MLFLOW_FILE)
        state.save()  # the key, before the run exists
        home = folder.parent.absolute()
        sink = MlflowSink(store_uri(tracking_uri, home=home), home=home, experiment=experiment)
        sink.connect()
        state.point_to(run_id := sink.open(state, kind="sweep", name=folder.name, parent_id=None, begun_ms=None))
        state.save()
        facts = RunFacts(name=folder.name, tags={**source_tags(), **tags}, results=_of_now(metrics), status=status)
        sink.params(run_id, facts)
        for point, values in points.items():
            if values and (point_id := load_run_state(point / MLFLOW_FILE).run_id):  # else MLflow does not have it
                sink.params(point_id, RunFacts(name="", results=_of_now(values)))
        sink.close(run_id, facts)

    _within_a_minute(send, say=lambda why: say(f"MLflow did not take the sweep {folder.name}: {why}"))


def _of_now(metrics: Mapping[str, float]) -> dict[str, tuple[float, int]]:
    now = now_ms()
    return {name: (value, now) for name, value in metrics.items()}


def _within_a_minute(task: Callable[[], None], *, say: Callable[[str], None]) -> None:
    """Run a task in a thread, abandoned after a minute; `say` gets the reason for a failure."""
    problem: list[str] = []

    def work() -> None:
        try:
            task()
        except Exception as error:  # noqa: BLE001  (the command itself succeeded)
            problem.append(f"{type(error).__name__}: {str(error)[:300]}")

    thread = threading.Thread(target=work, name="mlflow", daemon=True)
    thread.start()
    thread.join(_WAIT_SECONDS)
    if thread.is_alive():
        problem.append(f"no answer in {_WAIT_SECONDS:g} seconds")
    if problem:
        say(without_credentials(" ".join(problem[0].split())))

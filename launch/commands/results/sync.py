"""`shardvit sync`: send runs to tracking services after an outage, or from a cluster without network access."""

from pathlib import Path
from typing import Annotated, get_args

from cyclopts import Parameter

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.text import one_line
from shardvit.launch.local.env import experiment_name, tracking_uri
from shardvit.launch.local.output import say

_SCHEMES = ("http:", "https:", "sqlite:", "postgresql", "mysql", "mssql", "databricks", "file:")


def sync(
    run: Path,
    /,
    *runs: Path,
    to: Annotated[
        str | None,
        Parameter(
            help="mlflow, tensorboard or wandb; or the address of MLflow's server or database. Default: what "
            "tracking.to names (MLflow if nothing), with MLFLOW_TRACKING_URI, or mlflow.db beside the runs."
        ),
    ] = None,
    experiment: Annotated[
        str | None,
        Parameter(help="MLflow's experiment, W&B's project; default: MLFLOW_EXPERIMENT_NAME, or the recipe's."),
    ] = None,
) -> int:
    """Send to MLflow, TensorBoard or Weights & Biases what they lack of runs,
    each value once, however often you repeat it.

    Use it for runs whose server was unreachable, for those trained with
    tracking.mode=offline, and for those of the past; you may copy such a run's
    folder from a cluster and send it from here. Sends metrics, params, tags,
    data sets, files, pictures, tables, the model and the final status, as far
    as the service takes them. Creates runs that it does not have yet.

    Some examples:
        shardvit sync runs/vit-b16 --to http://mlflow:5000
        shardvit sync runs/* --to tensorboard
        WANDB_MODE=offline shardvit sync runs/vit-b16 --to wandb
    """
    from shardvit.launch.run.lock import locked
    from shardvit.pipeline.recipe.io import parse_recipe
    from shardvit.pipeline.recipe.vocabulary import RECIPE_FILE, SinkName
    from shardvit.pipeline.runs.read import run_folder_at
    from shardvit.pipeline.tracking.sinks.choose import sinks_of
    from shardvit.pipeline.tracking.sync_run import sync_run

    chosen: tuple[SinkName, ...] = tuple(name for name in get_args(SinkName) if name == to)
    if to is not None and not chosen:
        if not to.startswith(_SCHEMES):
            names = ", ".join(get_args(SinkName))
            raise UserError(f"--to {one_line(to)}: give {names}, or MLflow's address, such as http://mlflow:5000")
        chosen = ("mlflow",)
    uri = tracking_uri() if to in get_args(SinkName) else to or tracking_uri()
    code = 0
    for path in (run, *runs):
        if runs and not (path / RECIPE_FILE).is_file():  # runs/* also matches other things
            continue
        try:
            folder = run_folder_at(path)
            recipe = parse_recipe(folder.path / RECIPE_FILE)
            with locked(folder.path / ".train.lock", what=f"run {folder.path}"):
                names, project = chosen or recipe.tracking.to or ("mlflow",), experiment or experiment_name()
                sinks = sinks_of(folder, recipe, names=names, uri=uri, experiment=project)
                done = [(sink, each) for sink in sinks for each in sync_run(folder, recipe, sink, say=say)]
        except UserError as error:
            if not runs:
                raise
            say(str(error))
            code = 1
            continue
        for sink, stage in done:
            where = f"{sink.title}: " if sink.name != "mlflow" else ""
            print(f"{where}{folder.name}: {stage.describe()}", flush=True)
    return code

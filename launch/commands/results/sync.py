"""`shardvit sync`: send runs to MLflow after an outage, or from a cluster without network access."""

from pathlib import Path
from typing import Annotated

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
        Parameter(help="MLflow's server or database; default: MLFLOW_TRACKING_URI, or mlflow.db beside the runs."),
    ] = None,
    experiment: Annotated[
        str | None, Parameter(help="MLflow's experiment; default: MLFLOW_EXPERIMENT_NAME, or the recipe's.")
    ] = None,
) -> int:
    """Send to MLflow what it lacks of runs, each value once, however often you repeat it.

    Use it for runs whose server was unreachable, and for those trained with
    tracking.mode=offline; you may copy such a run's folder from a cluster and
    send it from here. Sends metrics, params, tags, data sets, files, pictures,
    tables, the model and the final status. Creates runs that the server does
    not have yet.

    Some examples:
        shardvit sync runs/vit-b16 --to http://mlflow:5000
        shardvit sync runs/*
    """
    from shardvit.launch.run.lock import locked
    from shardvit.pipeline.recipe.io import parse_recipe
    from shardvit.pipeline.recipe.vocabulary import RECIPE_FILE
    from shardvit.pipeline.runs.read import run_folder_at
    from shardvit.pipeline.tracking.mlflow_sink import sink_of
    from shardvit.pipeline.tracking.sender import sync_run

    if to is not None and not to.startswith(_SCHEMES):
        raise UserError(f"--to {one_line(to)}: give the address of a server or database, such as http://mlflow:5000")
    code = 0
    for path in (run, *runs):
        if runs and not (path / RECIPE_FILE).is_file():  # runs/* also matches other things
            continue
        try:
            folder = run_folder_at(path)
            recipe = parse_recipe(folder.path / RECIPE_FILE)
            with locked(folder.path / ".train.lock", what=f"run {folder.path}"):
                sink = sink_of(folder, recipe, uri=to or tracking_uri(), experiment=experiment or experiment_name())
                done = sync_run(folder, recipe, sink, say=say)
        except UserError as error:
            if not runs:
                raise
            say(str(error))
            code = 1
            continue
        for stage in done:
            print(f"{folder.name}: {stage.describe()}", flush=True)
    return code

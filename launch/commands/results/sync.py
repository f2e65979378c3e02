"""`shardvit sync`: what MLflow lacks of runs, after an outage or from a cluster without a way out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from data_shards.errors import UserError
from data_shards.text import one_line
from launch.local.env import experiment_name, tracking_uri
from launch.local.output import say

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
    """Send to MLflow what it lacks of runs: each value once, however often this is typed.

    For runs whose server was away, from the start or for a while, and for those
    trained with tracking.mode=offline; such a run's folder may be copied from a
    cluster and sent from here. Sends metrics, params, tags, data sets, files,
    pictures, tables, the model and how the run ended. A run that the server does
    not have yet is made there.

    Some examples:
        shardvit sync runs/vit-b16 --to http://mlflow:5000

        shardvit sync runs/*
    """
    from launch.run.lock import locked
    from pipeline.recipe.io import parse_recipe
    from pipeline.recipe.vocabulary import RECIPE_FILE
    from pipeline.runs.read import run_folder_at
    from pipeline.tracking.client import home_of, store_uri
    from pipeline.tracking.mlflow_sink import MlflowSink
    from pipeline.tracking.sync import sync_run

    if to is not None and not to.startswith(_SCHEMES):
        raise UserError(f"--to {one_line(to)}: give the address of a server or database, such as http://mlflow:5000")
    code = 0
    for path in (run, *runs):
        if runs and not (path / RECIPE_FILE).is_file():  # runs/* has other things, too
            continue
        try:
            folder = run_folder_at(path)
            recipe = parse_recipe(folder.path / RECIPE_FILE)
            with locked(folder.path / ".train.lock", what=f"run {folder.path}"):
                home, name = home_of(folder), experiment or experiment_name() or recipe.experiment
                sink = MlflowSink(store_uri(to or tracking_uri(), home=home), home=home, experiment=name)
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

"""Open the sinks that `tracking.to` names; refuse before training those whose package or login is missing.

Imports none of their packages: a sink does when it connects, outside the training process.
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import SinkName
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.tracking.client import home_of, store_uri
from shardvit.pipeline.tracking.sinks.mlflow_sink import MlflowSink
from shardvit.pipeline.tracking.sinks.sink import Sink
from shardvit.pipeline.tracking.sinks.tensorboard_sink import TensorboardSink
from shardvit.pipeline.tracking.sinks.wandb_sink import WandbSink, wandb_mode


def check_sinks(names: Sequence[SinkName]) -> None:
    """UserError if a sink's package is not installed, or W&B has neither login nor offline mode."""
    for name in names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name is no package
            raise UserError(f"tracking.to: {name} is not installed: pip install 'shardvit[{name}]', or take it out")
    if "wandb" in names and wandb_mode() == "online":
        files = (os.environ.get("NETRC") or "~/.netrc", "~/_netrc")
        has_key = any(os.environ.get(key) for key in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))
        if not has_key and not any(Path(file).expanduser().is_file() for file in files):
            raise UserError(
                "tracking.to: wandb has no login: run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
            )


def sinks_of(
    folder: RunFolder, recipe: Recipe, *, names: Sequence[SinkName], uri: str | None, experiment: str | None
) -> list[Sink]:
    """Open a run's sinks. MLflow's default is the database in the folder of runs; `experiment` replaces the recipe's,
    which is also W&B's default project."""
    check_sinks(names)
    experiment = experiment or recipe.experiment
    return [sink for name in names if (sink := _sink(name, folder, recipe, uri=uri, experiment=experiment))]


def _sink(name: SinkName, folder: RunFolder, recipe: Recipe, *, uri: str | None, experiment: str) -> Sink | None:
    match name:
        case "mlflow":
            home = home_of(folder)
            return MlflowSink(store_uri(uri, home=home), home=home, experiment=experiment)
        case "tensorboard":
            return TensorboardSink(folder.path)
        case "wandb":
            return None if wandb_mode() == "disabled" else WandbSink(folder, recipe, experiment=experiment)

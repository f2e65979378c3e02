"""What one attempt at one stage tells MLflow, and where that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.recipe.schema import Recipe
from pipeline.recipe.vocabulary import StageName
from pipeline.runs.run_folder import RunFolder
from pipeline.tracking.client import store_uri
from pipeline.tracking.facts import DatasetInput
from pipeline.tracking.tracking_thread import Timing


@dataclass(frozen=True, kw_only=True)
class TrackerSettings:
    """What one attempt at one stage tells MLflow.

    `params` are what follows from the recipe; `tags` this attempt's facts (job id, world size, host). Without
    `tracking_uri` it is mlflow.db with mlartifacts in the folder of all runs, also for a sweep's.
    """

    folder: RunFolder
    recipe: Recipe
    stage: StageName
    params: Mapping[str, str] = field(default_factory=dict)
    datasets: Sequence[DatasetInput] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    tracking_uri: str | None = None
    experiment: str = "shardvit"
    timing: Timing = field(default_factory=Timing)

    @property
    def home(self) -> Path:
        return home_of(self.folder)

    @property
    def uri(self) -> str:
        return store_uri(self.tracking_uri, home=self.home)


def home_of(folder: RunFolder) -> Path:
    """The folder of all runs, absolute."""
    sweep = folder.sweep
    return (folder.runs_root if sweep is None else sweep.parent).absolute()

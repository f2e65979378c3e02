"""What every stage is given: recipe, run folder, process group, MLflow's address, stop flag."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from data_shards.errors import UserError
from data_shards.text import printable
from pipeline.ranks.group import Ranks
from pipeline.ranks.stopping import StopFlag
from pipeline.recipe.schema import Recipe
from pipeline.run_folder import RunFolder

T = TypeVar("T")


@dataclass(frozen=True)
class Tracking:
    """Where MLflow's records go."""

    uri: str | None  # None: mlflow.db in the folder of all runs
    experiment: str


@dataclass(frozen=True)
class StageContext:
    """Handed to each stage by `launch.train`."""

    recipe: Recipe
    folder: RunFolder
    ranks: Ranks
    tracking: Tracking
    stop: StopFlag
    job_tags: dict[str, str]  # facts of this attempt: host, launcher, job id

    def on_main(self, task: Callable[[], T]) -> T | None:
        """`task`'s result on rank 0, None elsewhere; collective. Its `UserError` is raised on all ranks."""
        result, problem = None, ""
        if self.ranks.place.is_main:
            try:
                result = task()
            except UserError as error:
                problem = str(error)
        problem = self.ranks.from_main(problem)
        if problem:
            raise UserError(problem)
        return result

    def say(self, line: str) -> None:
        if self.ranks.place.is_main:
            print(printable(line), flush=True)

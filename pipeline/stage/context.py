"""Inputs of every stage: recipe, run folder, process group, stop flag, start time."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from shardvit.data_shards.errors import AgreedError, UserError
from shardvit.data_shards.text import printable
from shardvit.pipeline.ranks.group import Ranks, while_others_wait
from shardvit.pipeline.ranks.start_clock import StartClock
from shardvit.pipeline.ranks.stopping import StopFlag, TimeLimit
from shardvit.pipeline.ranks.watch import Watch
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.runs.pictures import Moment
from shardvit.pipeline.runs.run_folder import RunFolder

T = TypeVar("T")


def draw_nothing(stage: StageName, moment: Moment, step: int) -> None:
    """Do nothing, if no pictures are wanted."""


@dataclass(frozen=True)
class StageContext:
    """`launch.train` makes one per stage."""

    recipe: Recipe
    folder: RunFolder
    ranks: Ranks
    stop: StopFlag
    job_tags: dict[str, str]  # facts of this attempt: host, launcher, job id
    start: StartClock = field(default_factory=StartClock)  # until the stage's first step
    time_limit: TimeLimit | None = None  # of the job; None: unknown
    draw: Callable[[StageName, Moment, int], None] = draw_nothing  # request a moment's pictures; on rank 0
    drawing_seconds: Callable[[], float] = lambda: 0.0  # CPU time of drawing so far

    def on_main(self, task: Callable[[], T], *, takes: Literal["a moment", "long"] = "a moment") -> T | None:
        """Run `task` on rank 0 and return its result there, else None; collective. All ranks raise its `UserError`.
        "long" tasks may exceed the collective timeout."""
        result: T | None = None
        problem = ""

        def work() -> None:
            nonlocal result, problem
            try:
                result = task()
            except UserError as error:
                problem = str(error)

        if takes == "long":
            while_others_wait(self.ranks, work)
        elif self.ranks.place.is_main:
            work()
        problem = self.ranks.from_main(problem)
        if problem:
            raise AgreedError(problem)
        return result

    def watch(self, stage: StageName) -> Watch:
        """Watch the ranks during a stage; collective."""
        return Watch(
            self.folder.ranks(stage),
            place=self.ranks.place,
            attempt=self.ranks.from_main(f"{os.getpid()} {time.time_ns()}"),
            hang_seconds=self.recipe.engine.hang_seconds,
            say=lambda text: print(f"shardvit: {text}", file=sys.stderr, flush=True),
        )

    def say(self, line: str) -> None:
        if self.ranks.place.is_main:
            print(printable(line), flush=True)

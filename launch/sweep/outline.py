"""`shardvit sweep --dry-run`: list a sweep's runs with progress, steps and cost. Starts nothing."""

from dataclasses import dataclass
from typing import TypeVar

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.text import show_duration, table
from shardvit.launch.plan.gathering import make_plan
from shardvit.launch.plan.plan_options import PlanOptions
from shardvit.launch.plan.plan_page import UNKNOWN, RecipeForecast
from shardvit.launch.plan.shards import look
from shardvit.launch.run.pipeline_run import PipelineRun
from shardvit.launch.sweep.points import FINAL, Sweep
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.runs.run_folder import RunFolder

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class _Row:
    name: str
    values: tuple[str, ...]
    recipe: Recipe
    folder: RunFolder
    stages: tuple[StageName, ...]
    shown: StageName  # the stage whose images are counted


def outline(sweep: Sweep) -> str:
    """Format the table. UserError for anything that would stop a run from starting, except missing shards."""
    keys = [axis.key for axis in sweep.axes]
    shown, steps_left, seconds_left, notes, processes = [], 0, 0.0, dict[str, None](), 1
    for row in _rows(sweep):
        if row.folder.runs_root == sweep.root:  # else trained by another run
            restart = row.recipe.stages.names[0] if row.name == FINAL else None
            PipelineRun.open(row.recipe, runs_root=sweep.root, restart=restart, shards="if there")
        forecast = make_plan(row.recipe, PlanOptions())
        steps, seconds = _cost(forecast, row.stages)
        processes = forecast.machine.gpus
        shards = look(row.recipe, stage=row.shown)
        notes |= dict.fromkeys(f"! {text}: not checked" for text in shards.unopened)
        state = _state(row)
        if state != "done":
            steps_left, seconds_left = _plus(steps_left, steps), _plus(seconds_left, seconds)
        sizes = [UNKNOWN if one is None else f"{one.num_samples:,}" for one in (shards.train, shards.held_out)]
        cost = (_show_steps(steps), "" if seconds is None else show_duration(seconds))
        shown.append((row.name, *row.values, " + ".join(row.stages), state, *sizes, *cost))
    heading = ("run", *keys, "stages", "state", "trained on", "evaluated on", "steps", "time")
    on = "" if seconds_left is None else f", {show_duration(seconds_left)} on {processes:,} GPUs (see `shardvit plan`)"
    count = len(sweep.points)
    lines = [
        f"{sweep.root.name}: {count} point{'s' * (count > 1)}, chosen by {100 * sweep.hold_out:g} % of the training "
        f"images of {sweep.stage}; in {sweep.root}",
        "",
        table([heading, *shown], align="l" * (len(keys) + 3) + "r", heading="ruled"),
        f"Left to train: {_show_steps(steps_left)} steps{on}.",
        *notes,
    ]
    return "\n".join(lines)


def _rows(sweep: Sweep) -> list[_Row]:
    keys, first = len(sweep.axes), sweep.points[0]
    rows = [
        _Row(each.recipe.name, ("",) * keys, each.recipe, each.folder, (each.stage,), each.stage)
        for each in sweep.shared_stages
    ]
    rows += [
        _Row(each.name, tuple(each.values.values()), each.recipe, sweep.folder(each.name), (sweep.stage,), sweep.stage)
        for each in sweep.points
    ]
    own: list[StageName] = [
        name for name in first.final.stages.trained if first.shared is None or name != first.shared.stage
    ]
    return [*rows, _Row(FINAL, ("chosen",) * keys, first.final, sweep.folder(FINAL), tuple(own), sweep.stage)]


def _cost(forecast: RecipeForecast, stages: tuple[StageName, ...]) -> tuple[int | None, float | None]:
    """Sum steps and seconds of these stages; None: unknown. UserError if the plan has a problem."""
    steps, hours = 0, 0.0
    for stage in forecast.stages:
        if stage.name in stages:
            if stage.problem:
                raise UserError(stage.problem)
            steps = _plus(steps, None if stage.total_images is None else stage.plan.total_steps)
            hours = _plus(hours, stage.time.hours if stage.time else None)
    return steps, None if hours is None else 3600 * hours


def _plus(one: Number | None, other: Number | None) -> Number | None:
    return None if one is None or other is None else one + other


def _show_steps(steps: int | None) -> str:
    return UNKNOWN if steps is None else f"{steps:,}"


def _state(row: _Row) -> str:
    records = [row.folder.peek(stage) for stage in row.stages]
    if all(record.state == "done" for record in records):
        return "done"
    step = max((record.last_saved_step for record in records if record.state == "running"), default=None)
    return "" if step is None else f"at step {step:,}"

"""`shardvit sweep --dry-run`: the runs of a sweep, how far each is, its steps, and what all takes. Starts nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data_shards.errors import UserError
from data_shards.text import show_duration, table
from launch.plan.gathering import make_plan
from launch.plan.plan_options import PlanOptions
from launch.plan.plan_page import UNKNOWN, RecipeForecast
from launch.plan.shards import look
from launch.run.pipeline_run import PipelineRun
from launch.sweep.points import FINAL, Sweep
from pipeline.recipe.schema import Recipe
from pipeline.recipe.vocabulary import StageName
from pipeline.runs.run_folder import RunFolder


@dataclass(frozen=True)
class _Row:
    """One run, and which of its stages are its own."""

    name: str
    recipe: Recipe
    stages: tuple[StageName, ...]
    folder: RunFolder
    of: StageName  # whose images are shown
    values: tuple[str, ...] = ()


def outline(sweep: Sweep) -> str:
    """The table; UserError for anything that can be seen to keep a run from running. Shards may still be missing."""
    keys = [axis.key for axis in sweep.axes]
    rows = [
        _Row(each.recipe.name, each.recipe, (each.stage,), each.folder, each.stage, ("",) * len(keys))
        for each in sweep.earlier
    ]
    rows += [
        _Row(each.name, each.recipe, (sweep.stage,), sweep.folder(each.name), sweep.stage, tuple(each.values.values()))
        for each in sweep.points
    ]
    first = sweep.points[0]
    shared = None if first.earlier is None else first.earlier.stage
    last: tuple[StageName, ...] = tuple(name for name in first.final.stages.trained if name != shared)
    rows.append(_Row(FINAL, first.final, last, sweep.folder(FINAL), sweep.stage, ("chosen",) * len(keys)))
    shown, steps_left, seconds_left, notes, processes = [], 0, 0.0, dict[str, None](), 1
    for row in rows:
        _check(row, sweep.root)
        forecast = make_plan(row.recipe, PlanOptions())
        steps, seconds = _cost(forecast, row.stages)
        processes = forecast.machine.gpus
        there = look(row.recipe, stage=row.of)
        notes |= dict.fromkeys(f"! {text}: not checked" for text in there.unopened)
        state = _state(row)
        if state != "done":
            steps_left = None if steps is None or steps_left is None else steps_left + steps
            seconds_left = None if seconds is None or seconds_left is None else seconds_left + seconds
        shown.append(
            (
                row.name,
                *row.values,
                " + ".join(row.stages),
                state,
                *(UNKNOWN if one is None else f"{one.num_samples:,}" for one in (there.train, there.held_out)),
                UNKNOWN if steps is None else f"{steps:,}",
                "" if seconds is None else show_duration(seconds),
            )
        )
    heading = ("run", *keys, "stages", "state", "trained on", "evaluated on", "steps", "time")
    count = len(sweep.points)
    lines = [
        f"{sweep.root.name}: {count} point{'s' * (count > 1)}, chosen by {100 * sweep.hold_out:g} % of the training "
        f"images of {sweep.stage}; in {sweep.root}",
        "",
        table([heading, *shown], align="l" * (len(keys) + 3) + "r", heading="ruled"),
        f"Left to train: {UNKNOWN if steps_left is None else f'{steps_left:,}'} steps"
        + (
            ""
            if seconds_left is None
            else f", {show_duration(seconds_left)} on {processes:,} GPUs (see `shardvit plan`)"
        )
        + ".",
        *notes,
    ]
    return "\n".join(lines)


def _check(row: _Row, root: Path) -> None:
    if row.folder.runs_root != root:  # a run of its own, which is done
        return
    restart = row.recipe.stages.names[0] if row.name == FINAL else None
    PipelineRun.open(row.recipe, runs_root=root, restart=restart, shards="if there")


def _cost(forecast: RecipeForecast, stages: tuple[StageName, ...]) -> tuple[int | None, float | None]:
    """Steps and seconds of these stages; None: unknown. Raises UserError for sizes that do not fit together."""
    steps, seconds = 0, 0.0
    for stage in forecast.stages:
        if stage.name not in stages:
            continue
        if stage.problem:
            raise UserError(stage.problem)
        known = stage.total_images is not None
        steps = steps + stage.plan.total_steps if known and steps is not None else None
        hours = stage.time.hours if stage.time else None
        seconds = seconds + 3600 * hours if hours is not None and seconds is not None else None
    return steps, seconds


def _state(row: _Row) -> str:
    records = [row.folder.peek(stage) for stage in row.stages]
    if all(record.state == "done" for record in records):
        return "done"
    step = max((record.last_saved_step for record in records if record.state == "running"), default=None)
    return "" if step is None else f"at step {step:,}"

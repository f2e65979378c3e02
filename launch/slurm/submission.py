"""`shardvit submit`: check everything, then chain one job per unfinished stage.

Submits nothing until every stage has passed the checks of `shardvit run --dry-run` for the jobs' process count; if
SLURM refuses a job, cancels the earlier ones. Jobs read a copy of the resolved recipe, unaffected by later edits.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardvit.data_shards.durable import replace_text
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.location import Commands
from shardvit.data_shards.working_folder import import_folder
from shardvit.launch.run.pipeline_run import PipelineRun
from shardvit.launch.slurm.commands import After, Slurm, submit_command
from shardvit.launch.slurm.records import Submission, begin_jobs, read_submission, write_submission
from shardvit.launch.slurm.script import Paths, stage_script
from shardvit.launch.slurm.site import SlurmJob
from shardvit.pipeline.recipe.io import dump_recipe
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stage_plan import plan_stage
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.stage.stage_data import open_data


@dataclass(frozen=True)
class Job:
    """One job or array to submit."""

    name: str  # key in jobs.json
    script: Path
    text: str
    how: After = "afterok"  # dependency on the previous job


@dataclass(frozen=True)
class SubmissionPlan:
    """The jobs of a run or a sweep, before submission."""

    paths: Paths
    job: SlurmJob
    jobs: tuple[Job, ...]
    begin: Callable[[], dict[StageName, int]]  # writes the jobs' inputs; returns the run's steps by stage
    end: Callable[[Submission], None] = lambda submission: None  # called when all are submitted
    notes: tuple[str, ...] = ()  # checks that were left out
    closing: str = ""  # printed when all are submitted


def plan_submission(recipe: Recipe, *, runs_root: Path, job: SlurmJob, commands: Commands = "run") -> SubmissionPlan:
    """Check everything and render the scripts of unfinished stages; changes nothing on disk. `commands`: run a
    `pipe:` or refuse it. UserError for anything that would keep a stage from running."""
    if recipe.processes not in ("auto", job.processes):
        raise UserError(
            f"processes is {recipe.processes}, but {job.options.nodes} nodes with {job.tasks_per_node} processes each "
            f"make {job.processes}: set processes=auto, or ask for other nodes"
        )
    if recipe.engine.precision == "fp16" and not job.options.gpus_per_node:
        raise UserError("engine.precision fp16 needs a GPU: use bf16 or fp32 with --gpus-per-node 0")
    folder = RunFolder(runs_root=runs_root.absolute(), name=recipe.name)
    folder.check_recipe(recipe)
    notes = PipelineRun(recipe, folder, processes=job.processes, restart=None, commands=commands).check_stages()
    paths = Paths(run=folder.path, work=Path.cwd(), package=package_folder())
    resolved = recipe.model_copy(update={"processes": job.processes})
    jobs = [
        Job(stage, paths.script(stage), stage_script(stage, job=job, paths=paths))
        for stage in recipe.stages.names
        if folder.peek(stage).state != "done"
    ]

    def begin() -> dict[StageName, int]:
        begin_jobs(paths.slurm, stages=recipe.stages.names)
        replace_text(paths.recipe, dump_recipe(resolved))
        return total_steps(resolved, processes=job.processes, commands="run")

    return SubmissionPlan(paths, job, tuple(jobs), begin, notes=tuple(notes))


def submit_plan(plan: SubmissionPlan, *, slurm: Slurm) -> Submission:
    """Submit the scripts as a chain. UserError if earlier jobs are still queued, or SLURM refuses one (the others are
    cancelled)."""
    previous = read_submission(plan.paths.slurm)
    if previous is not None and (alive := slurm.alive(previous.jobs.values())):
        raise UserError(
            f"{plan.paths.run} has jobs in the queue ({', '.join(alive)}): wait for them, or run shardvit cancel"
        )
    submission = Submission(
        time=time.time(),
        processes=plan.job.processes,
        limit_seconds=plan.job.limit_seconds,
        max_restarts=plan.job.options.max_restarts,
        total_steps=plan.begin(),
    )
    for each in plan.jobs:
        each.script.parent.mkdir(parents=True, exist_ok=True)
        replace_text(each.script, each.text)
    before = None
    try:
        for each in plan.jobs:
            before = slurm.submit(each.script, after=before, how=each.how)
            submission = replace(submission, jobs={**submission.jobs, each.name: before})
            write_submission(plan.paths.slurm, submission)  # after each: an unrecorded job could not be cancelled
    except UserError:
        if submission.jobs:
            slurm.cancel(list(submission.jobs.values()))
        raise
    plan.end(submission)
    return submission


def render(jobs: Sequence[Job]) -> str:
    """Format the commands and scripts as they would be submitted."""
    parts, before = [], None
    for each in jobs:
        command = submit_command(each.script, after=before and f"JOB_OF_{before}", how=each.how)
        parts.append(f"# ---- {' '.join(command)}\n{each.text}")
        before = each.name
    return "\n".join(parts)


def total_steps(recipe: Recipe, *, processes: int, commands: Commands = "refuse") -> dict[StageName, int]:
    """Count each training stage's steps from the manifests; UserError if shards are missing or sizes do not fit."""
    steps: dict[StageName, int] = {}
    for stage in recipe.stages.trained:
        images = open_data(recipe, stage=stage, commands=commands).train.num_samples
        steps[stage] = plan_stage(recipe, stage=stage, samples_per_epoch=images, world_size=processes).total_steps
    return steps


def package_folder() -> Path | None:
    """The folder to import `shardvit` from; None if it is installed."""
    folder = Path(import_folder()).resolve()
    return None if folder.is_relative_to(Path(sys.prefix).resolve()) else folder

"""`shardvit submit --sweep`: the points of a sweep as a job array, then the choice, then the final run.

    stages before the swept one, once    unfinished ones only, as in any run
    STAGE array                          one task per point, one array per stage of the points
    choose                               after all tasks have ended, failed or not
    final-STAGE ...                      as in any run, after `choose` succeeded
    sum-up                               sweep.json, the table (sum-up.log) and MLflow, even after failures

Tasks save before their time limit, are requeued and resume. Nothing is submitted until everything is checked; if SLURM
refuses a job, the earlier ones are cancelled. Files are in RUNS/NAME-sweep/slurm. The same command again submits what
is not done.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from shardvit.data_shards.durable import replace_text
from shardvit.data_shards.errors import UserError
from shardvit.launch.run.pipeline_run import PipelineRun
from shardvit.launch.slurm.commands import After
from shardvit.launch.slurm.records import Submission, begin_jobs, write_submission
from shardvit.launch.slurm.script import Paths, Tasks, stage_script, step_script
from shardvit.launch.slurm.site import SlurmJob
from shardvit.launch.slurm.submission import Job, SubmissionPlan, package_folder, total_steps
from shardvit.launch.sweep.points import FINAL, Point, Sweep, open_point
from shardvit.launch.sweep.record import make_record
from shardvit.launch.sweep.step import store_finals
from shardvit.pipeline.recipe.io import dump_recipe
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import RECIPE_FILE, StageName
from shardvit.pipeline.runs.run_folder import RunFolder


def plan_sweep_jobs(sweep: Sweep, *, job: SlurmJob, at_once: int | None) -> SubmissionPlan:
    """Check every run and render the scripts, at most `at_once` tasks at a time; changes nothing on disk. UserError for
    anything that would keep a run from running."""
    if at_once is not None and at_once < 1:
        raise UserError(f"--at-once: it is {at_once}; give 1 or more")
    sweep = replace(
        sweep,
        root=sweep.root.absolute(),
        points=tuple(_with_processes(point, processes=job.processes) for point in sweep.points),
    )
    for folder, recipe, restart in sweep.runs():
        if recipe.processes != job.processes or (recipe.engine.precision == "fp16" and not job.options.gpus_per_node):
            raise UserError(f"{recipe.name}: fp16 needs GPUs, and processes must be {job.processes} or auto")
        folder.check_recipe(recipe, restart=restart)
        PipelineRun(recipe, folder, processes=job.processes, restart=restart).check_stages()
    paths = Paths(run=sweep.root, work=Path.cwd(), package=package_folder())
    open_points = tuple(point for point in sweep.points if sweep.folder(point.name).peek(sweep.stage).state != "done")
    jobs = tuple(_jobs(sweep, open_points, job=job, paths=paths, at_once=at_once))
    where = f"logs in {paths.slurm}, the table at the end in sum-up.log there"
    return SubmissionPlan(
        paths,
        job,
        jobs,
        begin=partial(_prepare, sweep),
        end=partial(_record_tasks, sweep, open_points),
        closing=f"{len(open_points)} points to train; {where}",
    )


def _record_tasks(sweep: Sweep, open_points: tuple[Point, ...], submission: Submission) -> None:
    for number, point in enumerate(open_points):
        own = {str(stage): f"{submission.jobs[stage]}_{number}" for stage in _own_stages(point)}
        steps = total_steps(point.recipe, processes=submission.processes, commands="run")
        write_submission(sweep.folder(point.name).path / "slurm", replace(submission, jobs=own, total_steps=steps))


def _jobs(
    sweep: Sweep, open_points: tuple[Point, ...], *, job: SlurmJob, paths: Paths, at_once: int | None
) -> Iterator[Job]:
    how: After = "afterok"
    for shared in sweep.shared_stages:
        if shared.folder.peek(shared.stage).state != "done":
            own = replace(paths, run=shared.folder.path)
            text = stage_script(shared.stage, job=job, paths=own)
            yield Job(f"{shared.folder.name}-{shared.stage}", own.script(shared.stage), text)
    if open_points:
        tasks = Tasks([point.name for point in open_points], at_once=at_once)
        for stage in _own_stages(open_points[0]):
            yield Job(stage, paths.script(stage), stage_script(stage, job=job, paths=paths, tasks=tasks), how)
            how = "aftercorr"
        how = "afterany"
    step = ("-m", "shardvit.launch.sweep.step", str(sweep.root), "--do")
    yield Job(
        "choose", paths.slurm / "choose.sbatch", step_script("choose", [*step, "choose"], job=job, paths=paths), how
    )
    final = replace(paths, run=sweep.folder(FINAL).path)
    point = sweep.points[0]
    for stage in point.final.stages.names:
        if point.shared is None or stage != point.shared.stage:
            yield Job(f"final-{stage}", final.script(stage), stage_script(stage, job=job, paths=final))
    text = step_script("sum-up", [*step, "sum-up"], job=job, paths=paths)
    yield Job("sum-up", paths.slurm / "sum-up.sbatch", text, "afterany")


def _prepare(sweep: Sweep) -> dict[StageName, int]:
    """Make the runs' folders with the recipes that their jobs read; returns no steps: the sweep itself has none."""
    begin_jobs(sweep.root / "slurm")
    make_record(sweep, failed={}).write(sweep.root)
    store_finals(sweep)
    for shared in sweep.shared_stages:
        if shared.folder.runs_root == sweep.root:
            _write_recipe(shared.folder, shared.recipe)
    for point in sweep.points:
        open_point(sweep.folder(point.name), point.recipe, shared=point.shared)
        _write_recipe(sweep.folder(point.name), point.recipe)
    # `choose` writes the final recipe.
    begin_jobs(sweep.folder(FINAL).path / "slurm", stages=sweep.points[0].final.stages.names)
    return {}


def _write_recipe(folder: RunFolder, recipe: Recipe) -> None:
    begin_jobs(folder.path / "slurm", stages=recipe.stages.names)
    replace_text(folder.path / "slurm" / RECIPE_FILE, dump_recipe(recipe))


def _own_stages(point: Point) -> list[StageName]:
    """The stages that are trained for this point alone."""
    return [name for name in point.recipe.stages.names if point.shared is None or name != point.shared.stage]


def _with_processes(point: Point, *, processes: int) -> Point:
    """Set the process count where a recipe says "auto", and make folders absolute."""

    def changed(recipe: Recipe) -> Recipe:
        return recipe.model_copy(update={"processes": processes}) if recipe.processes == "auto" else recipe

    shared = point.shared
    if shared is not None:
        folder = replace(shared.folder, runs_root=shared.folder.runs_root.absolute())
        shared = replace(shared, recipe=changed(shared.recipe), folder=folder)
    return replace(point, recipe=changed(point.recipe), final=changed(point.final), shared=shared)

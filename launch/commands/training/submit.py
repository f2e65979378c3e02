"""The commands `shardvit submit` and `cancel`; imports are inside, so that --help is fast."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from data_shards.errors import UserError
from launch.flags import DataFile, switch
from launch.local.env import paths_file
from launch.local.output import say
from launch.slurm.job_options import JobOptions
from pipeline.recipe.vocabulary import StageName

if TYPE_CHECKING:
    from launch.sweep.points import Sweep


def submit(
    recipe: str,
    /,
    *overrides: str,
    options: Annotated[JobOptions, Parameter(name="*")],
    site: Annotated[
        Path | None, Parameter(help="TOML file with what is the same for all jobs of this cluster.")
    ] = None,
    data: DataFile = None,
    runs: Annotated[Path, Parameter(help="Folder of all runs, on all nodes.")] = Path("runs"),
    render: Annotated[
        bool, Parameter(negative="", show_default=False, help="Print what would be submitted; submit nothing.")
    ] = False,
    sweep: Annotated[
        bool, Parameter(negative="", show_default=False, help="A grid, as of shardvit sweep: one job array.")
    ] = False,
    hold_out: Annotated[str | None, Parameter(help="With --sweep: as of shardvit sweep.")] = None,
    stage: Annotated[StageName | None, Parameter(help="With --sweep: as of shardvit sweep.")] = None,
    at_once: Annotated[int | None, Parameter(help="With --sweep: the most points at a time; default: all.")] = None,
) -> int:
    """Submit a recipe's unfinished stages to SLURM, one job each, in order.

    Everything is checked first, as by `shardvit run --dry-run`. A job saves
    before its time limit, is requeued and goes on; also after preemption, a
    node failure or a crash, if it makes progress. Scripts and logs lie in
    RUNS/NAME/slurm. The same command again resumes the run.

    Some examples:
        shardvit submit my.yaml --nodes 4 --gpus-per-node 8 --time 24:00:00
        shardvit submit digits --nodes 2 --tasks-per-node 1 --time 1:00:00 --render
        shardvit submit vit_b16_in21k finetune=pets --sweep --nodes 4 --gpus-per-node 8 --time 4:00:00
    """
    if sweep:
        from launch.sweep.points import plan_sweep, read_share

        share = read_share(hold_out)
        planned = plan_sweep(recipe, overrides, runs_root=runs, paths=paths_file(data), stage=stage, hold_out=share)
        return _submit_sweep(planned, options=options, site=site, render=render, at_once=at_once)
    if hold_out is not None or stage is not None or at_once is not None:
        raise UserError("--hold-out, --stage and --at-once mean nothing without --sweep: give it, too")
    from pipeline.recipe.io import load_recipe

    # A mistake in it is said before anything slow is imported.
    loaded = load_recipe(recipe, overrides=overrides, paths=paths_file(data))

    from launch.slurm.commands import Slurm
    from launch.slurm.site import job_of, read_site
    from launch.slurm.submission import plan_submission, submit_plan
    from launch.slurm.submission import render as rendered

    job = job_of(options, site=read_site(site))
    plan = plan_submission(loaded, runs_root=runs, job=job, commands="refuse" if render else "run")
    for note in plan.notes:
        say(note)
    if not plan.scripts:
        print(f"{plan.paths.run}: all stages are done", file=sys.stderr)
        return 0
    if render:
        print(rendered(plan.jobs), end="")
        return 0
    submission = submit_plan(plan, slurm=Slurm())
    for name in plan.scripts:
        print(f"{name}: job {submission.jobs[name]}, log {plan.paths.log(name)}")
    print(f"show its state with: shardvit watch {plan.paths.run}")
    return 0


def _submit_sweep(planned: Sweep, *, options: JobOptions, site: Path | None, render: bool, at_once: int | None) -> int:
    from launch.slurm.commands import Slurm
    from launch.slurm.site import job_of, read_site
    from launch.slurm.submission import render as rendered
    from launch.slurm.sweep_jobs import plan_sweep_jobs, submit_sweep

    plan = plan_sweep_jobs(planned, job=job_of(options, site=read_site(site)), at_once=at_once)
    if render:
        print(rendered(plan.jobs), end="")
        return 0
    submission = submit_sweep(plan, slurm=Slurm())
    for name, number in submission.jobs.items():
        print(f"{name}: job {number}")
    print(
        f"{len(plan.open_points)} points to train; logs in {plan.paths.slurm}, the table at the end in sum-up.log there"
    )
    print(f"show their state with: shardvit watch {plan.sweep.root}")
    return 0


def cancel(
    run: Path,
    /,
    *,
    now: Annotated[bool, switch("Do not let the running job save first.")] = False,
    wait_seconds: Annotated[float, Parameter(help="How long a running job may take to save.")] = 600.0,
) -> int:
    """End a run's SLURM jobs; the running one saves first, and `shardvit submit` resumes.

    RUN is its folder, RUNS/NAME; of a sweep's, RUNS/NAME-sweep, all jobs end.

    Some examples:
        shardvit cancel runs/digits
        shardvit cancel runs/digits --now
    """
    from launch.slurm.cancel import cancel_run
    from launch.slurm.commands import Slurm

    cancel_run(run, slurm=Slurm(), how="now" if now else "save", wait_seconds=wait_seconds)
    return 0

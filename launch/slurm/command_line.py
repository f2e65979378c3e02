"""The commands `shardvit submit`, `status` and `cancel`; imports are inside, so that --help is fast."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from launch.env import paths_file
from launch.flags import DataFile
from launch.output import say
from launch.slurm.options import JobOptions


def submit(
    recipe: str,
    /,
    *overrides: str,
    options: Annotated[JobOptions, Parameter(name="*")],
    site: Annotated[
        Path | None, Parameter(help="TOML file with what is the same for all jobs of this cluster.")
    ] = None,
    data: DataFile = None,
    runs: Annotated[Path, Parameter(help="Folder of all runs and of mlflow.db; all nodes must see it.")] = Path("runs"),
    render: Annotated[
        bool, Parameter(negative="", help="Print exactly what would be submitted, and submit nothing.")
    ] = False,
) -> int:
    """Submit a recipe's stages to SLURM, one job each, one after the other; finished stages are skipped.

    Everything is checked first, as by `shardvit run --dry-run`. A job saves
    before its time limit, is requeued and goes on; the same after preemption,
    a node failure or a crash, unless it makes no progress. Scripts, logs and
    records lie in RUNS/NAME/slurm. The same command again resumes the run.

    Some examples:
        shardvit submit my.yaml --nodes 4 --gpus-per-node 8 --time 24:00:00

        shardvit submit my.yaml --nodes 1 --gpus-per-node 4 --time 4:00:00 --render

        shardvit submit digits --nodes 2 --tasks-per-node 1 --time 1:00:00
    """
    from pipeline.recipe.io import load_recipe

    # A mistake in it is said before anything slow is imported.
    loaded = load_recipe(recipe, overrides=overrides, paths=paths_file(data))

    from launch.slurm.commands import Slurm
    from launch.slurm.site import job_of, read_site
    from launch.slurm.submit import plan_submission, submit_plan
    from launch.slurm.submit import render as rendered

    job = job_of(options, site=read_site(site))
    plan = plan_submission(loaded, runs_root=runs, job=job, commands="refuse" if render else "run")
    for note in plan.notes:
        say(note)
    if not plan.scripts:
        print(f"{plan.paths.run}: all stages are done", file=sys.stderr)
        return 0
    if render:
        print(rendered(plan), end="")
        return 0
    submission = submit_plan(plan, slurm=Slurm())
    for stage, number in submission.jobs.items():
        print(f"{stage}: job {number}, log {plan.paths.log(stage)}")
    print(f"show its state with: shardvit status {plan.paths.run}")
    return 0


def status(
    run: Path,
    /,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="Print it as JSON.")] = False,
) -> int:
    """Show how far a run's stages are: on SLURM with their jobs and time limits, on this machine without.

    RUN is its folder, RUNS/NAME.

    Some examples:
        shardvit status runs/digits

        shardvit status runs/digits --json
    """
    import json

    from launch.slurm.commands import Slurm
    from launch.slurm.status import as_text, as_tree, run_status

    found = run_status(run, slurm=Slurm())
    print(json.dumps(as_tree(found), indent=1) if as_json else as_text(found))
    return 0


def cancel(
    run: Path,
    /,
    *,
    now: Annotated[bool, Parameter(negative="", help="Do not let the running job save first.")] = False,
    wait_seconds: Annotated[float, Parameter(help="How long a running job may take to save.")] = 600.0,
) -> int:
    """End all SLURM jobs of a run; the running one saves first. `shardvit submit` goes on from there.

    RUN is its folder, RUNS/NAME.

    Some examples:
        shardvit cancel runs/digits

        shardvit cancel runs/digits --now
    """
    from launch.slurm.cancel import cancel_run
    from launch.slurm.commands import Slurm

    cancel_run(run, slurm=Slurm(), how="now" if now else "save", wait_seconds=wait_seconds)
    return 0

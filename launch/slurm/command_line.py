"""The commands `shardvit submit`, `status` and `cancel`. What they need is imported inside of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def submit(
    recipe: str,
    /,
    *overrides: str,
    nodes: Annotated[int, Parameter(help="Nodes of a training stage.")],
    time: Annotated[str, Parameter(help="Time limit of one job, such as 24:00:00; a stage may take several.")],
    gpus_per_node: Annotated[
        int, Parameter(help="GPUs of a node, one process each; 0: a cluster without GPUs, see --tasks-per-node.")
    ] = 0,
    tasks_per_node: Annotated[
        int | None, Parameter(help="Processes of a node, where there are no GPUs; default: one for each GPU.")
    ] = None,
    cpus_per_task: Annotated[int | None, Parameter(help="Cores of each process; default: the cluster's.")] = None,
    partition: Annotated[str | None, Parameter(help="As sbatch's; default: the site file's.")] = None,
    account: Annotated[str | None, Parameter(help="As sbatch's; default: the site file's.")] = None,
    qos: Annotated[str | None, Parameter(help="As sbatch's; default: the site file's.")] = None,
    constraint: Annotated[str | None, Parameter(help="As sbatch's; default: the site file's.")] = None,
    container: Annotated[
        str | None, Parameter(help="Image in which the processes run (pyxis or apptainer, see --site).")
    ] = None,
    signal_seconds: Annotated[
        int, Parameter(help="So long before the limit the processes save; SLURM is up to a minute early.")
    ] = 180,
    max_restarts: Annotated[
        int, Parameter(help="How often a stage that crashed is started again, as long as it gets further.")
    ] = 20,
    site: Annotated[
        Path | None, Parameter(help="TOML file with what is the same for all jobs of this cluster.")
    ] = None,
    runs: Annotated[Path, Parameter(help="Folder of all runs and of mlflow.db; all nodes must see it.")] = Path("runs"),
    render: Annotated[
        bool, Parameter(negative="", help="Print exactly what would be submitted, and submit nothing.")
    ] = False,
) -> int:
    """Submit a recipe's stages to SLURM, one job each, one after the other; finished stages are skipped.

    Everything is checked here first, as by `shardvit run --dry-run`. A job
    saves before its time limit, is requeued and goes on; so it does after
    preemption, a failed node or a crash, unless it gets no further. Scripts,
    logs and records lie in RUNS/NAME/slurm. The same command again goes on
    where the jobs ended.

    Some examples:
        shardvit submit my.yaml --nodes 4 --gpus-per-node 8 --time 24:00:00

        shardvit submit my.yaml --nodes 1 --gpus-per-node 4 --time 4:00:00 --render

        shardvit submit digits --nodes 2 --tasks-per-node 1 --time 1:00:00
    """
    from pipeline.recipe.io import load_recipe

    loaded = load_recipe(recipe, overrides=overrides)  # a mistake in it is said before anything slow is imported

    from launch.slurm.commands import Slurm
    from launch.slurm.job import Asked, job_of
    from launch.slurm.site import read_site
    from launch.slurm.submit import plan_submission, submit_plan
    from launch.slurm.submit import render as rendered

    asked = Asked(
        nodes=nodes,
        time=time,
        gpus_per_node=gpus_per_node,
        tasks_per_node=tasks_per_node,
        cpus_per_task=cpus_per_task,
        partition=partition,
        account=account,
        qos=qos,
        constraint=constraint,
        container=container,
        signal_seconds=signal_seconds,
        max_restarts=max_restarts,
    )
    job = job_of(asked, site=read_site(site))
    plan = plan_submission(
        recipe,
        overrides=overrides,
        runs_root=runs,
        job=job,
        loaded=loaded,
        commands="refuse" if render else "run",
    )
    for note in plan.notes:
        print(f"shardvit: {note}", file=sys.stderr)
    if not plan.scripts:
        print(f"{plan.paths.run}: all stages are done", file=sys.stderr)
        return 0
    if render:
        print(rendered(plan), end="")
        return 0
    submission = submit_plan(plan, slurm=Slurm())
    for stage, number in submission.jobs.items():
        print(f"{stage}: job {number}, log {plan.paths.log(stage)}")
    print(f"look at it with: shardvit status {plan.paths.run}")
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

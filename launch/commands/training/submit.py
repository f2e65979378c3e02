"""The commands `shardvit submit` and `cancel`. Imports late, to keep --help fast."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shardvit.data_shards.errors import UserError
from shardvit.launch.commands.data.pack import PackOptions
from shardvit.launch.flags import DataFile, demand_counts, switch
from shardvit.launch.local.env import paths_file
from shardvit.launch.local.output import say
from shardvit.launch.slurm.job_options import JobOptions
from shardvit.pipeline.recipe.vocabulary import StageName


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
    render: Annotated[bool, switch("Print what would be submitted; submit nothing.")] = False,
    sweep: Annotated[bool, switch("A grid, as of shardvit sweep: one job array.")] = False,
    hold_out: Annotated[str | None, Parameter(help="With --sweep: as of shardvit sweep.")] = None,
    stage: Annotated[StageName | None, Parameter(help="With --sweep: as of shardvit sweep.")] = None,
    pack: Annotated[bool, switch("A packing: RECIPE is SOURCE, then OUT and flags of shardvit pack.")] = False,
    tasks: Annotated[int | None, Parameter(help="With --pack: so many jobs make shards.")] = None,
    at_once: Annotated[
        int | None, Parameter(help="With --sweep, --pack: the most points or tasks at a time; default: all.")
    ] = None,
    packing: Annotated[PackOptions, Parameter(name="*", show=False)] = PackOptions(),  # noqa: B008 - frozen
) -> int:
    """Submit a recipe's unfinished stages to SLURM, one job each, in order.

    Everything is checked first, as by `shardvit run --dry-run`. A job saves
    before its time limit, is requeued and resumes; also after preemption, a
    node failure or a crash, as long as it makes progress. Scripts and logs are
    in RUNS/NAME/slurm. The same command again resumes the run.

    Some examples:
        shardvit submit my.yaml --nodes 4 --gpus-per-node 8 --time 24:00:00
        shardvit submit digits --nodes 2 --tasks-per-node 1 --time 1:00:00 --render
        shardvit submit vit_b16_in21k finetune=pets --sweep --nodes 4 --gpus-per-node 8 --time 4:00:00
        shardvit submit --pack in21k/ shards/in21k --resize-short 320 --tasks 100 --cpus-per-task 8 --time 4:00:00
    """
    if not sweep and ((hold_out, stage) != (None, None) or (at_once is not None and not pack)):
        raise UserError("--hold-out, --stage and --at-once have no effect without --sweep: give it, too")
    if not pack and (tasks is not None or packing != PackOptions()):
        raise UserError("--tasks and the flags of shardvit pack have no effect without --pack: give it, too")
    demand_counts(tasks=tasks, at_once=at_once)
    # Report mistakes in the recipe before importing anything slow.
    if pack:
        if len(overrides) != 1 or tasks is None or sweep or data is not None or options.nodes != 1:
            raise UserError("--pack: give SOURCE, OUT, --tasks and flags of shardvit pack; each task has one node")
        packing.request()  # its mistakes
        options = replace(options, tasks_per_node=None if options.gpus_per_node else 1)
        workers = [] if options.cpus_per_task is None else [f"--workers={options.cpus_per_task}"]

        from shardvit.launch.slurm.packing_jobs import plan_packing_jobs

        flags = [*packing.arguments(), *workers]
        plan_jobs = partial(plan_packing_jobs, recipe, *overrides, flags, tasks=tasks, at_once=at_once, runs=runs)
    elif sweep:
        from shardvit.launch.sweep.points import plan_sweep, read_share

        share = read_share(hold_out)
        points = plan_sweep(recipe, overrides, runs_root=runs, paths=paths_file(data), stage=stage, hold_out=share)

        from shardvit.launch.slurm.sweep_jobs import plan_sweep_jobs

        plan_jobs = partial(plan_sweep_jobs, points, at_once=at_once)
    else:
        from shardvit.pipeline.recipe.io import load_recipe

        loaded = load_recipe(recipe, overrides=overrides, paths=paths_file(data))

        from shardvit.launch.slurm.submission import plan_submission

        plan_jobs = partial(plan_submission, loaded, runs_root=runs, commands="refuse" if render else "run")

    from shardvit.launch.slurm import submission
    from shardvit.launch.slurm.commands import Slurm
    from shardvit.launch.slurm.site import job_of, read_site

    plan = plan_jobs(job=job_of(options, site=read_site(site)))
    for note in plan.notes:
        say(note)
    if not plan.jobs:
        print(f"{overrides[0]}: packed" if pack else f"{plan.paths.run}: all stages are done", file=sys.stderr)
        return 0
    if render:
        print(submission.render(plan.jobs), end="")
        return 0
    for name, number in submission.submit_plan(plan, slurm=Slurm()).jobs.items():
        print(f"{name}: job {number}" + ("" if sweep or name == "shards" else f", log {plan.paths.slurm}/{name}.log"))
    if plan.closing:
        print(plan.closing)
    print(f"show the state with: shardvit watch {plan.paths.run}")
    return 0


def cancel(
    run: Path,
    /,
    *,
    now: Annotated[bool, switch("Do not let the running job save first.")] = False,
    wait_seconds: Annotated[float, Parameter(help="How long a running job may take to save.")] = 600.0,
) -> int:
    """End a run's SLURM jobs; the running one saves first, and `shardvit submit` resumes.

    RUN is its folder, RUNS/NAME; with RUNS/NAME-sweep all jobs of a sweep end, with a packing's OUT those
    of the packing, whose finished shards stay.

    Some examples:
        shardvit cancel runs/digits
        shardvit cancel runs/digits --now
    """
    from shardvit.launch.slurm.cancel import cancel_run
    from shardvit.launch.slurm.commands import Slurm
    from shardvit.launch.slurm.packing_jobs import packing_of

    if packing := packing_of(run):
        run, now = packing[0], True
    cancel_run(run, slurm=Slurm(), how="now" if now else "save", wait_seconds=wait_seconds)
    return 0

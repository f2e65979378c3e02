"""Entry point of every rank under every launcher: run a recipe's stages one after another in the same processes.

    PYTHONSAFEPATH=1 deepspeed --num_gpus 8 --no_local_rank --module shardvit.launch.train RECIPE --stage pretrain
    python -P -m shardvit.launch.local.torchrun --nproc-per-node 8 -m shardvit.launch.train RECIPE --stage pretrain
    python -P -m shardvit.launch.train RECIPE --stage pretrain

`shardvit run` starts this by itself (`local`). Each stage has its own record, MLflow run and watch, and the same bits
as in fresh processes (`pipeline.ranks.process`); imports and rendezvous are paid once. Of several stages, finished ones
are skipped; a failing one ends the processes. Exit codes of a rank and of `launch.local.torchrun`: 0 done, 2 a user's
mistake or an unwritable disk, 75 stopped by a signal after saving (the same command resumes), 1 anything else.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shardvit.data_shards.errors import AgreedError, SampleError, UserError, WorkerDied
from shardvit.data_shards.working_folder import leave_out
from shardvit.launch.draw_and_send import DrawAndSend
from shardvit.launch.local.env import (
    job_tags,
    node_share,
    omp_num_threads,
    paths_file,
    pictures_wanted,
    read_place,
    rendezvous_folder,
    says_mistakes,
    supervisor_pid,
    tracking_uri,
    without_place,
)
from shardvit.launch.local.output import go_on, say
from shardvit.launch.local.processes import RANK_COMMAND, handled
from shardvit.launch.local.start import run_node
from shardvit.launch.run.disk import Presence, disk_problem, gone
from shardvit.launch.run.lock import locked
from shardvit.pipeline.checkpoint.mend_record import mend_records
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.ranks.process import allow_open_files, needed_open_files, process_started
from shardvit.pipeline.ranks.start_clock import StartClock, seconds_since_start
from shardvit.pipeline.recipe.io import difference_to_parent, load_recipe
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import ALL_STAGES, EXIT_STOPPED, EXIT_USER_ERROR, StageName
from shardvit.pipeline.report.best import describe_results
from shardvit.pipeline.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from shardvit.pipeline.ranks.group import Ranks
    from shardvit.pipeline.ranks.stopping import StopFlag
    from shardvit.pipeline.stage.context import StageContext

_COLLATERAL_WAIT_SECONDS = 3.0  # after another rank ends, so that its exit code is reported
_WATCH_SECONDS = 1.0
_SPEAKERS = 2  # per host
_SENDING_SECONDS = 120.0  # at most, after the last stage
_MOST_READERS = 16  # threads under data.workers: auto


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this rank; returns the exit code."""
    leave_out()
    go_on()
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    rank = _Rank(
        options.stages,
        folder=RunFolder(runs_root=options.runs, name=""),
        place=Place(local_rank=0 if says_mistakes() else 1),
        stage=options.stages[0],
    )
    try:
        rank.place = read_place()
        recipe = load_recipe(
            options.recipe, overrides=options.overrides, paths=paths_file(options.data), own_code=options.own_code
        )
        rank.folder = RunFolder(runs_root=options.runs, name=recipe.name)
        rank.folder.check_recipe(recipe)
        _check_stages(recipe, options.stages)
        rank.recipe = recipe
        share = None if options.stages == ["swap_head"] else node_share(processes=recipe.processes)
        if share is not None:  # srun gave this node one task, and there are several GPUs
            return run_node(share, [*RANK_COMMAND, *arguments])
        return _run(recipe, rank=rank, difference=difference_to_parent(options.recipe, overrides=options.overrides))
    except UserError as error:
        # Each node has its own disks, so one rank per node speaks; if all ranks agreed on the error, only rank 0.
        speaks = rank.place.is_main if isinstance(error, AgreedError) else rank.place.local_rank == 0
        if speaks or isinstance(error, SampleError):
            say(str(error))
        return EXIT_USER_ERROR
    except WorkerDied as error:
        say(f"rank {rank.place.rank}: {error}")
        return 1
    except Exception as error:  # noqa: BLE001 - the last stop
        return _failed(error, rank)


@dataclass
class _Rank:
    stages: Sequence[StageName]
    folder: RunFolder
    place: Place
    stage: StageName  # the current one
    recipe: Recipe | None = None


def _check_stages(recipe: Recipe, stages: Sequence[StageName]) -> None:
    names = recipe.stages.names
    for stage in stages:
        if stage not in names:
            raise UserError(f"the recipe has no stage {stage}: it has {', '.join(names)}")
    if list(stages) != [name for name in names if name in stages]:
        raise UserError(f"--stage {' --stage '.join(stages)}: give each once, in the order {', '.join(names)}")


def _failed(error: Exception, rank: _Rank) -> int:
    """Say why this rank ends, unless another rank does; returns the exit code."""
    place, heartbeats = rank.place, rank.folder.ranks(rank.stage)
    problem = disk_problem(error, folder=rank.folder.path) or _memory_problem(error, rank)
    if problem is not None:
        if place.local_rank:
            # The first rank may report the same error; then the launcher sends this one a SIGTERM.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(_COLLATERAL_WAIT_SECONDS)
        from shardvit.pipeline.ranks.dead_ranks import is_to_say_mistake

        if is_to_say_mistake(heartbeats, place=place):
            say(problem)
        return EXIT_USER_ERROR
    if place.world_size > 1:
        from shardvit.pipeline.ranks.dead_ranks import peer_is_gone, report_gone
        from shardvit.pipeline.ranks.group import PeerGone

        if isinstance(error, PeerGone):
            # Two per host say it, as one may be the missing rank; all would flood a shared log.
            if place.local_rank < _SPEAKERS or place.log == "of a host":
                say(f"rank {place.rank}: {error}")
            return 1
        if peer_is_gone(error):
            report_gone(heartbeats, place=place, say=say)
            time.sleep(_COLLATERAL_WAIT_SECONDS)
            return 1
    from shardvit.pipeline.own_code.by_path import own_traceback

    print(own_traceback(error), end="", file=sys.stderr, flush=True)
    return 1


def _memory_problem(error: Exception, rank: _Rank) -> str | None:
    """Advise if memory ran out, as a restart would run out again; None: another error."""
    from shardvit.pipeline.budget.out_of_memory import is_out_of_memory, what_to_change

    if not is_out_of_memory(error) or rank.recipe is None or rank.stage == "swap_head":
        return None
    import psutil
    import torch

    on_gpu = isinstance(error, torch.OutOfMemoryError)
    num_bytes = torch.cuda.mem_get_info()[1] if on_gpu and torch.cuda.is_available() else psutil.virtual_memory().total
    return what_to_change(
        rank.recipe,
        stage=rank.stage,
        processes=rank.place.world_size,
        memory_bytes=num_bytes,
        of="GPU" if on_gpu else "machine",
        sharing=1 if on_gpu else rank.place.local_world_size,
    )


def _run(recipe: Recipe, *, rank: _Rank, difference: str) -> int:
    place, folder = rank.place, rank.folder
    clock = StartClock(
        rank.stage,
        say=partial(print, file=sys.stderr, flush=True) if place.is_main else None,
        earlier_seconds=seconds_since_start(),
        earlier_cpu_seconds=time.process_time(),
    )
    clock.set_status("importing libraries")
    from shardvit.pipeline.tracking.sinks.choose import check_sinks

    wants_pictures, _ = pictures_wanted(), tracking_uri()  # report mistakes before slow imports
    check_sinks(recipe.tracking.to)
    stop = _listen(place, recipe)

    from shardvit.model.without_compiler import import_timm

    import_timm()
    from shardvit.pipeline.checkpoint.saver import SaveFailed
    from shardvit.pipeline.ranks.stopping import Stopped
    from shardvit.pipeline.stage.context import StageContext
    from shardvit.pipeline.tracking.system_metrics import node_metrics
    from shardvit.pipeline.training.after_step import TrainingFailed
    from shardvit.pipeline.training.stages import run_stage  # noqa: F401 - while nobody waits in the process group

    beside = None
    if place.is_main:  # forked now: no GPU, process group or lock yet
        pictures = "draw" if wants_pictures else "off"
        beside = DrawAndSend(folder, environ=without_place(), pictures=pictures, say=say)
    with contextlib.ExitStack() as held:
        held.callback(clock.close)
        # While this rank waits for others there is nothing to save, and nobody polls the stop flag.
        with handled((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), signal.SIG_DFL):
            ranks = _meet(rank, recipe, held=held, clock=clock, difference=difference)
            there = held.enter_context(contextlib.closing(Presence(folder.path)))
        context = StageContext(recipe, folder, ranks, stop, job_tags=job_tags(), start=clock)
        if beside is not None:
            held.enter_context(beside)
            context = replace(context, draw=beside.ask, drawing_seconds=beside.cpu_seconds)
        if place.local_rank == 0 and recipe.tracking.system_metrics and "mlflow" in recipe.tracking.to:
            nodes = -(-place.world_size // place.local_world_size)
            node = f"node{place.rank // place.local_world_size}-{platform.node()}" if nodes > 1 else ""
            held.enter_context(node_metrics(folder, node=node, environ=without_place()))
        try:
            with there.demanded():
                _run_stages(context, rank)
        except Stopped:
            return EXIT_STOPPED
        except (TrainingFailed, SaveFailed) as error:
            if place.is_main:
                say(f"{rank.stage} failed: {error}")
            return 1
        ranks.leave()
        if beside:
            beside.close(patience_seconds=_SENDING_SECONDS, hurry=lambda: stop.reason is not None)
    return 0


def _listen(place: Place, recipe: Recipe) -> StopFlag:
    """Listen to signals, watch parent processes, and raise the limit of open files."""
    from shardvit.pipeline.ranks.stopping import StopFlag

    stop = StopFlag()
    stop.listen()
    _watch_parents(stop)
    workers = min(_MOST_READERS, os.cpu_count() or 1) if recipe.data.workers == "auto" else recipe.data.workers
    threads = workers if recipe.data.kind_of_workers(workers) == "thread" else 0
    few_files = allow_open_files(needed_open_files(world_size=place.world_size, reading_threads=threads))
    if few_files and place.local_rank == 0:
        say(few_files)
    return stop


def _meet(rank: _Rank, recipe: Recipe, *, held: contextlib.ExitStack, clock: StartClock, difference: str) -> Ranks:
    """Open the run folder on rank 0, join the process group, and share out the cores."""
    import torch

    from shardvit.pipeline.ranks.group import Ranks
    from shardvit.pipeline.ranks.process import settle_threads
    from shardvit.pipeline.stage.data_workers import cores_of

    place, folder, meeting = rank.place, rank.folder, rendezvous_folder()
    if meeting is not None and meeting.parent == folder.path.absolute() and not meeting.exists():
        raise UserError(gone(folder.path))  # `shardvit run` made both: do not make them again here
    if place.is_main:
        # An orphaned earlier attempt may still be saving.
        held.enter_context(locked(folder.path / ".train.lock", what=f"run {folder.path}", wait_seconds=60))
        folder.open(recipe)
        folder.note_difference(difference)
        for note in mend_records(folder, recipe.stages.names):
            say(note)
    clock.set_status("meeting the other ranks")
    ranks = Ranks(place, timeout_seconds=recipe.engine.collective_timeout_seconds)
    if not torch.cuda.is_available():
        too_many = settle_threads(cores=cores_of(ranks), asked=omp_num_threads())
        if too_many and place.is_main:
            say(too_many)
    return ranks


def _run_stages(context: StageContext, rank: _Rank) -> None:
    """Run the stages (of several, those not done). Stopped may also come between two."""
    from shardvit.pipeline.ranks.process import ProcessState
    from shardvit.pipeline.ranks.stopping import Stopped
    from shardvit.pipeline.training.stages import run_stage

    fresh, say_start, stages = ProcessState(), context.start.say, rank.stages
    for stage in stages:
        if stage != stages[0]:
            fresh.reset()
            if any(context.ranks.gather_objects(context.stop.reason is not None)):
                raise Stopped
            context = replace(context, start=StartClock(stage, say=say_start))
        rank.stage = stage
        if len(stages) > 1 and context.ranks.from_main(context.folder.peek(stage).state) == "done":
            context.say(f"{stage}: done already{describe_results(context.folder, stage=stage)}")
            continue
        run_stage(context, stage=stage)
        context.start.close()
        if stage != stages[-1]:  # the launcher reports the last one
            context.say(f"{stage}: done{describe_results(context.folder, stage=stage)}")


def _watch_parents(stop: StopFlag) -> None:
    """Request a stop when the launcher or `shardvit run` dies, to leave no orphan."""
    launcher, supervisor = os.getppid(), supervisor_pid()
    if process_started(os.getpid()) is None:  # no /proc: PIDs cannot be checked
        supervisor = None
    started = None if supervisor is None else process_started(supervisor)

    def watch() -> None:
        while True:
            time.sleep(_WATCH_SECONDS)
            if os.getppid() != launcher:
                return stop.request("the death of its launcher")
            # A zombie has no start time; a reused PID has another one.
            if supervisor is not None and (started is None or process_started(supervisor) != started):
                return stop.request("the death of shardvit run")

    threading.Thread(target=watch, daemon=True, name="watch-parents").start()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    # The deepspeed launcher prepends --local_rank unless --no_local_rank is given; the environment has it, too.
    ours = [argument for argument in arguments if not argument.startswith(("--local_rank", "--local-rank"))]
    parser = argparse.ArgumentParser(prog="shardvit train", description="Run stages of a recipe on this rank.")
    parser.add_argument("recipe", help="path of a YAML file, or the name of a recipe that ships with shardvit")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe")
    stage_help = "may be repeated: the same processes run one after another"
    parser.add_argument("--stage", required=True, choices=ALL_STAGES, action="append", dest="stages", help=stage_help)
    parser.add_argument("--data", type=Path, help="file with the shards of each role; default: $SHARDVIT_DATA")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs")
    trust_help = "recorded: also run own code as the run's recipe names it, if its file is still the same"
    parser.add_argument("--own-code", choices=("typed", "recorded"), default="typed", help=trust_help)
    return parser.parse_intermixed_args(ours)


def leave(code: int) -> NoReturn:
    """Exit without tearing down torch, DeepSpeed and MLflow, which takes 1.8 CPU seconds."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader has left
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())

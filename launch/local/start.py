"""`shardvit run` on one machine: start the ranks of one or several stages, and wait for them.

Each rank has its own session, so Ctrl-C reaches only this process, which makes the ranks finish their step and save. A
second Ctrl-C kills everything; files on disk stay intact. Uses no launcher: `deepspeed` and torchrun import torch once
or twice more (9 CPU seconds a stage) and have their own exit codes. The ranks rendezvous in a temporary folder in the
run folder (`pipeline.ranks.group`), so runs never compete for a port.
"""

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardvit.launch.local.env import NodeShare, accelerator, without_place
from shardvit.launch.local.nursery import Nursery
from shardvit.launch.local.processes import RANK_COMMAND, STOP_SIGNALS, rank_environment, run_ranks, signal_of
from shardvit.pipeline.own_code.by_path import references
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import EXIT_STOPPED, StageName

STOPPING = "stopping: the ranks finish their step and save (Ctrl-C again kills them)"
_RENDEZVOUS_PREFIX = ".rendezvous-"


@dataclass(frozen=True)
class Launch:
    """Stages to start, and their settings."""

    recipe: Recipe  # resolved
    recipe_file: Path  # the copy in the run folder, unaffected by later edits of the user's file
    runs_root: Path
    stage: StageName
    processes: int  # of a training stage
    then: tuple[StageName, ...] = ()  # later stages in the same processes
    nursery: Nursery | None = None  # forks the ranks; None, or once it has ended: each is started anew

    @property
    def stages(self) -> tuple[StageName, ...]:
        return (self.stage, *self.then)

    @property
    def ranks(self) -> int:
        """Processes to start; swap_head alone only edits saved weights and needs one."""
        return 1 if self.stages == ("swap_head",) else self.processes


def rank_arguments(launch: Launch) -> list[str]:
    """Return the arguments of `launch.train`, equal on all ranks."""
    stages = [word for stage in launch.stages for word in ("--stage", stage)]
    own = ["--own-code", "recorded"] if references(launch.recipe.model_dump(mode="json")) else []
    return [str(launch.recipe_file), *stages, "--runs", str(launch.runs_root), *own]


def run_stage_locally(launch: Launch) -> int:
    """Run the stages; returns the most informative exit code (negative: killed by a signal). The caller holds the run
    folder's lock. KeyboardInterrupt if stopped before any rank saved; OSError if the run folder is not writable."""
    n = launch.ranks
    with _rendezvous(launch.runs_root / launch.recipe.name) as folder:
        code, stop_was_asked = run_ranks(
            [*RANK_COMMAND, *rank_arguments(launch)],
            [rank_environment(rank, ranks=n, rendezvous=folder) | accelerator() for rank in range(n)],
            nursery=launch.nursery,
            on_stop=lambda: print(f"\n{STOPPING}", file=sys.stderr, flush=True),
        )
    # SIGTERM kills a rank that is still importing.
    if stop_was_asked and (code == 0 or signal_of(code) in STOP_SIGNALS):
        raise KeyboardInterrupt
    return code


def run_node(share: NodeShare, arguments: Sequence[str]) -> int:
    """Run Python processes on one node of a SLURM step; returns the exit code (128 + n for signal n)."""
    environments = [without_place() | share.environ_of(rank) for rank in range(share.processes)]
    try:
        code, stop_was_asked = run_ranks(arguments, environments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if stop_was_asked and signal_of(code) in STOP_SIGNALS:  # no handler was installed yet
        return EXIT_STOPPED
    return code if code >= 0 else 128 - code


@contextmanager
def _rendezvous(run_folder: Path) -> Iterator[Path]:
    """Create a temporary folder in the run folder; removes those of killed attempts."""
    for leftover in run_folder.glob(f"{_RENDEZVOUS_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_RENDEZVOUS_PREFIX, dir=run_folder)).absolute()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

"""`shardvit run` on one machine: start the ranks of one or several stages, and wait for their end.

Each rank has its own session, so Ctrl-C reaches this process alone, which makes the ranks finish their step and save; a
second Ctrl-C kills everything, which harms nothing on disk. The stage's record says whether it is done.

No launcher in between: `deepspeed` and torchrun would import torch once or twice more before the first rank does (9 CPU
seconds a stage), and have exit codes of their own. The ranks meet through a folder in the run folder that lives as long
as they do (`pipeline.ranks.group`), so two runs never compete for a port.
"""

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launch.local.env import NodeShare, num_gpus, without_place
from launch.local.processes import RANK_COMMAND, STOP_SIGNALS, rank_environment, run_ranks, signal_of
from pipeline.recipe.schema import Recipe
from pipeline.recipe.vocabulary import EXIT_STOPPED, StageName

STOPPING = "stopping: the ranks finish their step and save (Ctrl-C again kills them)"
_RENDEZVOUS_PREFIX = ".rendezvous-"


@dataclass(frozen=True)
class Launch:
    """The stages to start, and with what."""

    recipe: Recipe  # resolved
    recipe_file: Path  # in the run folder; later edits of the user's file are for the next run
    runs_root: Path
    stage: StageName
    processes: int  # of a training stage
    then: tuple[StageName, ...] = ()  # the stages that the same processes continue with

    @property
    def stages(self) -> tuple[StageName, ...]:
        return (self.stage, *self.then)

    @property
    def ranks(self) -> int:
        """Processes to start: swap_head is arithmetic on saved weights, and alone needs only one."""
        return 1 if self.stages == ("swap_head",) else self.processes


def rank_arguments(launch: Launch) -> list[str]:
    """Arguments of `launch.train`, the same on every rank."""
    stages = [word for stage in launch.stages for word in ("--stage", stage)]
    return [str(launch.recipe_file), *stages, "--runs", str(launch.runs_root)]


def run_stage_locally(launch: Launch) -> int:
    """Run the stages to their end; returns the most telling exit code (negative: killed by a signal).

    The caller holds the run folder's lock. Raises KeyboardInterrupt if the user stopped it before any rank saved, and
    OSError if the run folder cannot be written.
    """
    more = {} if num_gpus() else {"DS_ACCELERATOR": "cpu"}  # else DeepSpeed warns in every process
    with _rendezvous(launch.runs_root / launch.recipe.name) as folder:
        code, stop_was_asked = run_ranks(
            [*RANK_COMMAND, *rank_arguments(launch)],
            [rank_environment(rank, ranks=launch.ranks, rendezvous=folder) | more for rank in range(launch.ranks)],
            on_stop=lambda: print(f"\n{STOPPING}", file=sys.stderr, flush=True),
        )
    # A rank that is still importing dies of SIGTERM.
    if stop_was_asked and (code == 0 or signal_of(code) in STOP_SIGNALS):
        raise KeyboardInterrupt
    return code


def run_node(share: NodeShare, arguments: Sequence[str]) -> int:
    """Run Python processes on one node of a step; returns the exit code (for a signal 128 + n)."""
    environments = [without_place() | share.environ_of(rank) for rank in range(share.processes)]
    try:
        code, stop_was_asked = run_ranks(arguments, environments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if stop_was_asked and signal_of(code) in STOP_SIGNALS:  # it was not listening yet
        return EXIT_STOPPED
    return code if code >= 0 else 128 - code


@contextmanager
def _rendezvous(run_folder: Path) -> Iterator[Path]:
    """Make a private folder in the run folder; remove those of killed attempts."""
    for leftover in run_folder.glob(f"{_RENDEZVOUS_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_RENDEZVOUS_PREFIX, dir=run_folder)).absolute()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

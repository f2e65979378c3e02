"""`shardvit run` on one machine: start the ranks of one stage, and stand by until they are gone.

Each rank runs in a session of its own, so Ctrl-C reaches this process alone. It passes the wish on to the ranks, which
finish their step and save; a second Ctrl-C kills everything at once, which harms nothing on disk. Whether the stage is
done is read from its record, not from the exit codes.

No launcher stands between: `deepspeed` and torchrun would import torch once or twice more before the first rank does
(9 CPU seconds for each stage), and end with exit codes of their own. They remain for several hosts (`hosts`) and for
those who type them. The ranks find one another through a folder inside the run folder that lives as long as they do
(see `pipeline.ranks.group`), so two runs never ask for the same port.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.endings import overall_code, signal_of
from launch.env import RENDEZVOUS, SUPERVISOR_PID, num_gpus, without_place
from launch.processes import RANK_COMMAND, kill_all
from launch.signals import handled
from pipeline.recipe.schema import Recipe, StageName
from pipeline.vocabulary import EXIT_STOPPED

_RENDEZVOUS_PREFIX = ".rendezvous-"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
STOPPING = "stopping: the ranks finish their step and save (Ctrl-C again kills them)"
_LOOK_SECONDS = 0.05
# How long the others may go on when the first rank has ended: in good order, rank 0 may still be telling MLflow the
# rest; after a failure they find out within seconds, unless they hang in a collective operation.
_FOLLOW_SECONDS, _FOLLOW_FAILED_SECONDS = 300.0, 30.0


@dataclass(frozen=True)
class Launch:
    """What to start.

    Attributes:
        recipe: resolved.
        recipe_file: the same, as the run folder keeps it; what the user's file says meanwhile is for the next run.
        runs_root: folder of all runs.
        stage: one of the recipe's.
        processes: of a training stage; swap_head is arithmetic on saved weights, and has one.
    """

    recipe: Recipe
    recipe_file: Path
    runs_root: Path
    stage: StageName
    processes: int

    @property
    def ranks(self) -> int:
        """Processes of this stage."""
        return 1 if self.stage == "swap_head" else self.processes


def rank_arguments(launch: Launch) -> list[str]:
    """What `launch.train` gets on every rank."""
    return [str(launch.recipe_file), "--stage", launch.stage, "--runs", str(launch.runs_root)]


def rank_environment(launch: Launch, rank: int, *, rendezvous: Path) -> dict[str, str]:
    """What one rank finds in its environment, instead of any launcher's or batch script's numbers around us."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": launch.ranks, "LOCAL_WORLD_SIZE": launch.ranks}
    return {
        **without_place(),
        **{name: str(number) for name, number in place.items()},
        SUPERVISOR_PID: str(os.getpid()),
        RENDEZVOUS: str(rendezvous),
        **({} if num_gpus() else {"DS_ACCELERATOR": "cpu"}),  # said aloud, or DeepSpeed wonders in every process
    }


def run_stage_locally(launch: Launch) -> int:
    """Run one stage to its end; returns the exit code of the rank that tells why (negative: a signal killed it).

    The caller holds the run folder's lock.

    Raises:
        KeyboardInterrupt: the user stopped it and no rank answered that it has saved: none was listening yet, it was
            asked for a second time, or the stage came to its end instead.
        OSError: nothing can be written to the run folder.
    """
    received: list[int] = []  # acted upon by the loop, when all ranks that are to hear of it were started
    ranks: list[subprocess.Popen[bytes]] = []
    with (
        _rendezvous(launch.runs_root / launch.recipe.name) as rendezvous,
        handled(STOP_SIGNALS, lambda number, frame: received.append(number)),
    ):
        try:
            for rank in range(launch.ranks):
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, *RANK_COMMAND, *rank_arguments(launch)],
                        env=rank_environment(launch, rank, rendezvous=rendezvous),
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )
            code = _stand_by(ranks, received=received)
        finally:
            kill_all(SUPERVISOR_PID, str(os.getpid()))  # what a rank has started outlives it when it is killed
            for process in ranks:
                process.wait()
    # A rank that is still importing dies of the SIGTERM that it was sent.
    if received and (code == 0 or signal_of(code) in STOP_SIGNALS):
        raise KeyboardInterrupt
    return code


def _stand_by(ranks: Sequence[subprocess.Popen[bytes]], *, received: list[int]) -> int:
    """Until all are gone, or those that are left must be killed; returns the code that tells most.

    Raises:
        KeyboardInterrupt: all are to be killed at once.
    """
    seen = 0  # of `received`
    first: int | None = None  # the code that tells most of those that ended first
    kill_at = math.inf
    while None in [rank.poll() for rank in ranks] and time.monotonic() < kill_at:
        if seen < len(received):
            seen += 1
            if seen == 1:
                print(f"\n{STOPPING}", file=sys.stderr, flush=True)
                _terminate(ranks)
            elif received[:seen].count(signal.SIGINT) > 1:  # batch systems repeat themselves: only Ctrl-C is impatience
                raise KeyboardInterrupt
        elif first is None and any(rank.returncode is not None for rank in ranks):
            first = _overall(ranks, stop_was_asked=bool(seen))
            in_order = first in (0, EXIT_STOPPED)
            kill_at = time.monotonic() + (_FOLLOW_SECONDS if in_order else _FOLLOW_FAILED_SECONDS)
            if not in_order:
                _terminate(ranks)
        else:
            time.sleep(_LOOK_SECONDS)
    return _overall(ranks, stop_was_asked=bool(seen)) if seen or not first else first


def _overall(ranks: Sequence[subprocess.Popen[bytes]], *, stop_was_asked: bool) -> int:
    """Of those that have ended; 1 comes last: it is also what a rank ends with that found another one gone."""
    codes = [rank.returncode for rank in ranks if rank.returncode is not None]
    return overall_code(sorted(codes, key=lambda code: code == 1), stop_was_asked=stop_was_asked)


def _terminate(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.terminate()  # does nothing to one that has ended


@contextlib.contextmanager
def _rendezvous(run_folder: Path) -> Iterator[Path]:
    """A fresh folder that only this user can read; those of attempts that were killed are removed.

    In the run folder, which is there: its lock is held.
    """
    for leftover in run_folder.glob(f"{_RENDEZVOUS_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_RENDEZVOUS_PREFIX, dir=run_folder)).absolute()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

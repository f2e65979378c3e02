"""`shardvit run` on one machine: start the `deepspeed` launcher for one stage, and stand by until it is over.

The launcher runs in a session of its own, so Ctrl-C reaches this process alone. It passes the wish on to the ranks,
which finish their step and save; a second Ctrl-C kills everything at once, which harms nothing on disk. Whether the
stage is done is read from its record, never from the launcher's exit code: deepspeed's is 0 when a signal killed it.

The ranks find one another through a folder inside the run folder that lives as long as the launcher (see
`pipeline.rendezvous`), so two runs never ask for the same port.
"""

from __future__ import annotations

import contextlib
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
from types import FrameType

from launch.endings import signal_of
from launch.env import RENDEZVOUS, SUPERVISOR_PID, num_gpus, without_place
from launch.processes import RANK_COMMAND, kill_all, ranks, terminate
from launch.signals import handled
from pipeline.recipe import Recipe, StageName

_RENDEZVOUS_PREFIX = ".rendezvous-"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
STOPPING = "stopping: the ranks finish their step and save (Ctrl-C again kills them)"
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Launch:
    """What to start."""

    recipe: Recipe
    recipe_argument: str
    overrides: Sequence[str]
    runs_root: Path
    stage: StageName
    processes: int


def rank_arguments(launch: Launch) -> list[str]:
    """What `launch.train` gets on every rank."""
    return [
        *(launch.recipe_argument, *launch.overrides),
        *("--stage", launch.stage, "--runs", str(launch.runs_root)),
    ]


def launch_command(launch: Launch) -> list[str]:
    """The command line: deepspeed, or torchrun for the accelerate backend; one plain process for swap_head."""
    rank = rank_arguments(launch)
    if launch.stage == "swap_head":  # arithmetic on saved weights: nothing to distribute
        return [sys.executable, *RANK_COMMAND, *rank]
    match launch.recipe.engine.backend:
        case "deepspeed":
            return [
                *(sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "critical"),
                *("--num_gpus", str(launch.processes), "--no_local_rank", "--module", "launch.train", *rank),
            ]
        case "accelerate":
            return [
                *(sys.executable, "-m", "launch.torchrun", "--standalone", "--nproc-per-node", str(launch.processes)),
                *("-m", "launch.train", *rank),
            ]


def run_stage_locally(launch: Launch) -> int:
    """Run one stage to its end; returns the exit code of the launcher (negative: it was killed).

    The caller holds the run folder's lock.

    Raises:
        KeyboardInterrupt: the user stopped it and no rank answered that it has saved: there was none yet, or it was
            asked for a second time, or the stage came to its end instead.
        OSError: nothing can be written to the run folder.
    """
    mark = (SUPERVISOR_PID, str(os.getpid()))
    asked = interrupts = 0
    killed = False

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked, interrupts, killed
        asked += 1
        interrupts += number == signal.SIGINT
        there = ranks(*mark)
        if there and asked > 1 and interrupts < 2:  # batch systems repeat themselves; only Ctrl-C again is impatience
            return
        if asked == 1 and there:
            print(f"\n{STOPPING}", file=sys.stderr)
            terminate(there)
        else:
            killed = True
            kill_all(*mark)

    with _rendezvous(launch.runs_root / launch.recipe.name) as rendezvous:
        environment = {
            **without_place(),
            SUPERVISOR_PID: str(os.getpid()),
            RENDEZVOUS: str(rendezvous),
            "PYTHONUNBUFFERED": "1",
            **({} if num_gpus() else {"DS_ACCELERATOR": "cpu"}),  # said aloud, or DeepSpeed wonders in every process
        }
        with handled(STOP_SIGNALS, ask_to_stop):
            try:
                child = subprocess.Popen(launch_command(launch), env=environment, start_new_session=True)
                if killed:  # before there was anything to kill
                    kill_all(*mark)
                code = child.wait()
                while asked and not killed and ranks(*mark):  # the launcher got the signal too, and left before them
                    time.sleep(_LOOK_SECONDS)
            finally:
                kill_all(*mark)  # a rank whose launcher was killed, for instance
    # A rank that is still importing dies of the SIGTERM that it was sent, and a launcher of what everything was sent.
    if killed or (asked and (code == 0 or signal_of(code) in STOP_SIGNALS)):
        raise KeyboardInterrupt
    return code


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

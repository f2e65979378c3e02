"""`shardvit run` on one machine: start the `deepspeed` launcher for one stage, and stand by until it is over.

The launcher runs in a session of its own, so Ctrl-C reaches this process alone. It passes the wish on to the ranks,
which finish their step and save; a second Ctrl-C kills everything at once, which harms nothing on disk. Whether the
stage is done is read from its record, never from the launcher's exit code: deepspeed's is 0 when a signal killed it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from launch.env import SUPERVISOR_PID, free_port, num_gpus
from pipeline.recipe import Recipe, StageName

_RANK_COMMAND = ["-u", "-m", "launch.train"]


@dataclass(frozen=True)
class Launch:
    """What to start."""

    recipe: Recipe
    recipe_argument: str
    overrides: Sequence[str]
    runs_root: Path
    stage: StageName
    processes: int


def launch_command(launch: Launch) -> list[str]:
    """The command line: deepspeed, or torchrun for the accelerate backend; one plain process for swap_head."""
    rank = [
        *(launch.recipe_argument, *launch.overrides),
        *("--stage", launch.stage, "--runs", str(launch.runs_root)),
    ]
    if launch.stage == "swap_head":  # arithmetic on saved weights: nothing to distribute
        return [sys.executable, *_RANK_COMMAND, *rank]
    port = free_port()
    match launch.recipe.engine.backend:
        case "deepspeed":
            return [
                *(sys.executable, "-m", "deepspeed.launcher.runner", "--quiet"),
                *("--num_gpus", str(launch.processes), "--master_port", str(port), "--no_local_rank"),
                *("--module", "launch.train", *rank),
            ]
        case "accelerate":
            return [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(launch.processes)),
                *("--master-addr", "127.0.0.1", "--master-port", str(port), "-m", "launch.train", *rank),
            ]


def run_stage_locally(launch: Launch) -> int:
    """Run one stage to its end; returns the exit code of the launcher (negative: it was killed)."""
    environment = {
        **os.environ,
        SUPERVISOR_PID: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
        **({} if num_gpus() else {"DS_ACCELERATOR": "cpu"}),  # said aloud, or DeepSpeed wonders in every process
    }
    child = subprocess.Popen(launch_command(launch), env=environment, start_new_session=True)
    asked = 0

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        ranks = _ranks_below(child.pid)
        if asked == 1 and ranks:
            print("\nstopping: the ranks finish their step and save (Ctrl-C again kills them)", file=sys.stderr)
            for rank in ranks:
                rank.send_signal(signal.SIGTERM)
        else:
            os.killpg(child.pid, signal.SIGKILL)

    previous = {number: signal.signal(number, ask_to_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return child.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _kill_leftovers(child.pid)


def _ranks_below(pid: int) -> list[psutil.Process]:
    """The processes that train, among everything that the launcher has started."""
    ranks = []
    for process in _children(pid):
        try:
            if process.cmdline()[1:4] == _RANK_COMMAND:
                ranks.append(process)
        except psutil.Error:
            continue
    return ranks


def _children(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.Error:
        return []


def _kill_leftovers(session: int) -> None:
    """End whatever of the launcher's session outlived it, a rank whose launcher was killed, for instance."""
    try:
        os.killpg(session, signal.SIGKILL)
    except ProcessLookupError:
        pass

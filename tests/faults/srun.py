"""Stands in for srun: `python -m tests.faults.srun RANKS ARGUMENTS...` starts so many ranks and waits for all.

It ends no rank itself (srun's --kill-on-bad-exit would): a rank that does not find out by itself that another one is
gone shows as a time-out.
Its exit code is the highest of the ranks', as srun's, a signal's as 128 + n: so it does not hang on who is seen first.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from types import FrameType

from shardvit.launch.local.env import RENDEZVOUS, SUPERVISOR_PID, without_place


def main() -> int:
    """Start, wait, and pass signals on."""
    count, arguments = int(sys.argv[1]), sys.argv[2:]
    # In the case's folder: a stand-in that is killed leaves it, as srun leaves what is its own.
    rendezvous = tempfile.mkdtemp(prefix="srun-", dir=os.getcwd())
    environment = {
        **without_place(),
        **{SUPERVISOR_PID: str(os.getpid()), "PYTHONUNBUFFERED": "1", "DS_ACCELERATOR": "cpu"},
        RENDEZVOUS: rendezvous,
        **{"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)},
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-u", "-m", "shardvit.launch.train", *arguments],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]

    def pass_on(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            rank.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, pass_on)
    code, running = 0, list(ranks)
    while running:
        for rank in list(running):
            ended = rank.poll()
            if ended is not None:
                running.remove(rank)
                code = max(code, ended if ended >= 0 else 128 - ended)
        time.sleep(0.02)
    shutil.rmtree(rendezvous)
    return code


if __name__ == "__main__":
    sys.exit(main())

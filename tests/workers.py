"""What the tests of several ranks share: the processes of one file of theirs, from their start to their end."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def run_ranks(worker: Path, out: Path, *, world_size: int, accelerator: str = "cpu") -> None:
    """Run `python WORKER OUT RANK WORLD_SIZE` for every rank, by default on the CPU; AssertionError with what all said
    if one fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": accelerator}
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), str(out), str(rank), str(world_size)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=500)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)

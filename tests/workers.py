"""What the tests of several ranks share: the processes of one file of theirs, from their start to their end."""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.conftest import python_path


def run_ranks(
    worker: Path, out: Path, *, world_size: int, accelerator: str = "cpu", limit_seconds: float = 500
) -> None:
    """Run `python WORKER OUT RANK WORLD_SIZE` for every rank, by default on the CPU.

    If a rank fails, the others, which may wait for it, get ten more seconds, and AssertionError has what all said.
    """
    environment = {**os.environ, "PYTHONPATH": python_path(), "DS_ACCELERATOR": accelerator}
    with ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(world_size)]
        processes = [
            subprocess.Popen(
                [sys.executable, str(worker), str(out), str(rank), str(world_size)],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank, output in enumerate(outputs)
        ]
        deadline = time.monotonic() + limit_seconds
        try:
            while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
                if any(codes):
                    deadline = min(deadline, time.monotonic() + 10)
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        said = []
        for rank, output in enumerate(outputs):
            output.seek(0)
            said.append(f"rank {rank} ended with {processes[rank].returncode}:\n{output.read()}")
    assert not any(process.returncode for process in processes), "\n".join(said)

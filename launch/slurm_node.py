"""One srun task for a whole node (`srun --ntasks-per-node 1 python -m launch.train ...`): a process for each GPU.

The task itself becomes the little launcher: it starts the processes, passes signals on to them, waits for all, and ends
with the highest of their exit codes, as srun does (of a signal: 128 + n). When the first one has ended the others have
as long as under srun's --wait; they find out by themselves that it is gone. All nodes must have as many GPUs.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.signals import handled

WAIT_SECONDS = 120.0  # after the first process has ended: saving is over by then, MLflow may still be told the rest
_LOOK_SECONDS = 0.1
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


@dataclass(frozen=True)
class NodeShare:
    """What one node has to start.

    Attributes:
        node: its number among the step's.
        nodes: of the step.
        processes: on each of them.
        address: of the first node.
        port: where all meet on it.
    """

    node: int
    nodes: int
    processes: int
    address: str
    port: int

    def names_of(self, local_rank: int) -> dict[str, str]:
        """What a launcher sets for one process."""
        return {
            "RANK": str(self.node * self.processes + local_rank),
            "WORLD_SIZE": str(self.nodes * self.processes),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def run_node(
    share: NodeShare, *, arguments: Sequence[str], environ: Mapping[str, str], wait_seconds: float = WAIT_SECONDS
) -> int:
    """Run this node's processes to their end; returns the exit code.

    Args:
        share: what to start.
        arguments: of python, for each process.
        environ: what they inherit.
        wait_seconds: for the others when the first has ended; then they are killed.
    """
    processes: list[subprocess.Popen[bytes]] = []

    received: list[int] = []  # not passed on yet; by the loop, when all that are to have them were started

    with handled(_PASSED_ON, lambda number, frame: received.append(number)):
        try:
            for local_rank in range(share.processes):
                names = {**environ, **share.names_of(local_rank)}
                processes.append(subprocess.Popen([sys.executable, *arguments], env=names))
            deadline: float | None = None
            while any(process.poll() is None for process in processes):
                while received:
                    number = received.pop(0)
                    for process in processes:
                        process.send_signal(number)  # does nothing to one that has ended
                if deadline is None and any(process.returncode is not None for process in processes):
                    deadline = time.monotonic() + wait_seconds
                if deadline is not None and time.monotonic() >= deadline:
                    break
                time.sleep(_LOOK_SECONDS)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
            codes = [process.wait() for process in processes]
    return max(code if code >= 0 else 128 - code for code in codes)

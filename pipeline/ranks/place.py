"""Where a process stands among all processes of a run. A value; who reads it from the environment is `launch.env`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """Rank numbers under their usual names.

    Attributes:
        master_addr, master_port: of the first process, where a launcher named them.
        rendezvous: a folder of this machine in which rank 0 writes its address instead.
        gpu: number of this process's GPU among those that it sees; None: the local rank's, as when it sees all.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    rendezvous: Path | None = None
    gpu: int | None = None

    @property
    def is_main(self) -> bool:
        """The one process that prints, logs and writes what is written once."""
        return self.rank == 0

"""Rank, world size and rendezvous, read from the environment by `launch.local.env`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Log = Literal["of the run", "of a host"]


@dataclass(frozen=True)
class Place:
    """This process's rank, and how it finds the others."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"  # rank 0's, as is the port, if a launcher set them
    master_port: int = 29500
    rendezvous: Path | None = None  # a local folder where rank 0 writes its address instead
    gpu: int | None = None  # index among the visible GPUs; None: the local rank
    log: Log = "of a host"  # all hosts write to a log "of the run", so one of them reports for all

    @property
    def is_main(self) -> bool:
        """True for the process that prints, logs and writes shared files."""
        return self.rank == 0

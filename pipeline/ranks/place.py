"""Rank, world size and how the ranks find each other. Read from the environment by `launch.local.env`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Log = Literal["of the run", "of a host"]


@dataclass(frozen=True)
class Place:
    """This process's rank, and how it finds the others.

    Attributes:
        master_addr, master_port: of rank 0, if a launcher set them.
        rendezvous: a local folder where rank 0 writes its address instead.
        log: what its output goes to; "of the run": all hosts write to it, so it is enough if one of them says a thing.
        gpu: index of this process's GPU among the visible ones; None: the local rank.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    rendezvous: Path | None = None
    gpu: int | None = None
    log: Log = "of a host"

    @property
    def is_main(self) -> bool:
        """The one process that prints, logs and writes shared files."""
        return self.rank == 0

"""Rank, world size and how the ranks find each other. Read from the environment by `launch.env`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """Rank numbers under their usual names.

    Attributes:
        master_addr, master_port: of rank 0, if a launcher set them.
        rendezvous: a local folder where rank 0 writes its address instead.
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

    @property
    def is_main(self) -> bool:
        """The one process that prints, logs and writes shared files."""
        return self.rank == 0

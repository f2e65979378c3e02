"""Where the processes of a run find one another: the store that a process group begins with.

One process alone needs no network. `shardvit run` gives the processes of one machine a fresh private folder: rank 0
listens on a port that the system chooses and writes it there; nobody ever asks for a port that somebody else may take
meanwhile. Launchers that name the first process's host and port (several nodes, torchrun by hand) are taken at their
word.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

from torch import distributed

from pipeline.ranks.place import Place

ADDRESS_FILE = "address"
_LOOK_SECONDS = 0.02


class PeerGone(RuntimeError):
    """Another process of the run is gone, or never came."""


def join_group(place: Place, *, backend: str, timeout_seconds: float) -> None:
    """Make the default process group.

    Raises:
        PeerGone: rank 0 did not open its door, or others did not come, in time.
    """
    timeout = timedelta(seconds=timeout_seconds)
    if place.world_size == 1:
        store = distributed.HashStore()
    elif place.rendezvous is not None:
        store = _store_in(place.rendezvous, place=place, timeout=timeout)
    else:
        try:
            distributed.init_process_group(
                backend=backend,
                init_method=f"tcp://{place.master_addr}:{place.master_port}",
                rank=place.rank,
                world_size=place.world_size,
                timeout=timeout,
            )
        except distributed.DistError as error:
            raise PeerGone(
                f"the {place.world_size} processes did not meet at {place.master_addr}:{place.master_port} "
                f"(MASTER_ADDR, MASTER_PORT) within {timeout_seconds:.0f} seconds (engine.collective_timeout_seconds): "
                f"{str(error).splitlines()[0]}"
            ) from error
        return
    distributed.init_process_group(
        backend=backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout
    )


def _store_in(folder: Path, *, place: Place, timeout: timedelta) -> distributed.TCPStore:
    """Rank 0's store, whose address lies in `folder`."""
    if place.is_main:
        store = distributed.TCPStore(
            place.master_addr, 0, place.world_size, is_master=True, timeout=timeout, wait_for_workers=False
        )
        beside = folder / f".{ADDRESS_FILE}"
        beside.write_text(f"{place.master_addr} {store.port}", encoding="utf-8")
        os.replace(beside, folder / ADDRESS_FILE)
        return store
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            host, port = (folder / ADDRESS_FILE).read_text(encoding="utf-8").split()
            break
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                raise PeerGone(
                    f"rank 0 did not begin within {timeout.total_seconds():.0f} seconds "
                    f"(engine.collective_timeout_seconds): {folder} holds no address"
                ) from None
            time.sleep(_LOOK_SECONDS)
    return distributed.TCPStore(
        host, int(port), place.world_size, is_master=False, timeout=timeout, wait_for_workers=False
    )

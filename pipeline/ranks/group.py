"""The process group: how ranks meet, and small exchanges between them (losses, flags, digests).

Big tensors are the engine's; these exchanges use gloo on the host, so they never wait in a GPU's stream. Every method
is collective, called by all ranks in the same order. A single process needs no network. On one machine `shardvit run`
gives the ranks a fresh private folder, where rank 0 writes the free port that it listens on, so no other program can
take it first. MASTER_ADDR and MASTER_PORT of other launchers (several nodes, torchrun) are used as given.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
from torch import distributed

from data_shards.durable import replace_text
from pipeline.ranks.place import Place

Value = TypeVar("Value")

ADDRESS_FILE = "address"
_POLL_SECONDS = 0.02


class PeerGone(RuntimeError):
    """Another process of the run has died, or never came."""


class Ranks:
    """Joins the process group when made; PeerGone if rank 0 never came. A rank is dead after `timeout_seconds`."""

    def __init__(self, place: Place, *, timeout_seconds: float) -> None:
        self.place = place
        cuda = torch.cuda.is_available()
        device = place.local_rank if place.gpu is None or not cuda else place.gpu
        # DeepSpeed and accelerate read these. The local rank selects the GPU; on a CPU DeepSpeed tells the processes of
        # a machine apart by it.
        os.environ.update(
            RANK=str(place.rank),
            WORLD_SIZE=str(place.world_size),
            LOCAL_RANK=str(device),
            LOCAL_WORLD_SIZE=str(place.local_world_size),
            LOCAL_SIZE=str(place.local_world_size),
            MASTER_ADDR=place.master_addr,
            MASTER_PORT=str(place.master_port),
        )
        if cuda:
            torch.cuda.set_device(device)
        join_group(place, backend="nccl" if cuda else "gloo", timeout_seconds=timeout_seconds)
        group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        assert isinstance(group, distributed.ProcessGroup)  # a number would mean "not a member"
        self._host_group = group

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Every rank's [k] in rank order: float64 [ranks, k] on the CPU, the same bits on all ranks."""
        mine = values.detach().to("cpu", torch.float64).contiguous()
        everyone = [torch.empty_like(mine) for _ in range(self.place.world_size)]
        distributed.all_gather(everyone, mine, group=self._host_group)
        return torch.stack(everyone)

    def gather_objects(self, value: Value) -> list[Value]:
        """Every rank's picklable value, in rank order."""
        everyone = [value] * self.place.world_size
        distributed.all_gather_object(everyone, value, group=self._host_group)
        return everyone

    def start_any(self, *flags: bool) -> Agreement:
        """Start to find out, asynchronously, which flags are set on any rank."""
        raised = torch.tensor([int(flag) for flag in flags], dtype=torch.int32)
        work = distributed.all_reduce(raised, op=distributed.ReduceOp.MAX, group=self._host_group, async_op=True)
        return Agreement(raised, work)

    def barrier(self) -> None:
        distributed.barrier(group=self._host_group)

    def leave(self) -> None:
        distributed.destroy_process_group()


class Agreement:
    """The pending answer of `Ranks.start_any`."""

    def __init__(self, flags: torch.Tensor, work: distributed.Work | None) -> None:
        self._flags = flags
        self._work = work

    def result(self) -> tuple[bool, ...]:
        """Wait for the answer: for each flag, whether any rank had it set; the same on every rank."""
        if self._work is not None:
            self._work.wait()
        return tuple(bool(flag) for flag in self._flags.tolist())


def join_group(place: Place, *, backend: str, timeout_seconds: float) -> None:
    """Make the default process group; PeerGone if rank 0 or others did not come in time."""
    timeout = timedelta(seconds=timeout_seconds)
    store, address = None, None
    if place.world_size == 1:
        store = distributed.HashStore()
    elif place.rendezvous is not None:
        store = _store_in(place.rendezvous, place=place, timeout=timeout)
    else:
        address = f"tcp://{place.master_addr}:{place.master_port}"
    try:
        distributed.init_process_group(
            backend, address, timeout, world_size=place.world_size, rank=place.rank, store=store
        )
    except distributed.DistError as error:
        if address is None:
            raise
        raise PeerGone(
            f"the {place.world_size} processes did not meet at {place.master_addr}:{place.master_port} "
            f"(MASTER_ADDR, MASTER_PORT) within {timeout_seconds:.0f} seconds (engine.collective_timeout_seconds): "
            f"{str(error).splitlines()[0]}"
        ) from error


def _store_in(folder: Path, *, place: Place, timeout: timedelta) -> distributed.TCPStore:
    if place.is_main:
        store = distributed.TCPStore(
            place.master_addr, 0, place.world_size, is_master=True, timeout=timeout, wait_for_workers=False
        )
        replace_text(folder / ADDRESS_FILE, f"{place.master_addr} {store.port}", sync="none")
        return store
    deadline = time.monotonic() + timeout.total_seconds()
    while not (folder / ADDRESS_FILE).exists():
        if time.monotonic() >= deadline:
            raise PeerGone(
                f"rank 0 did not start within {timeout.total_seconds():.0f} seconds "
                f"(engine.collective_timeout_seconds): there is no address in {folder}"
            )
        time.sleep(_POLL_SECONDS)
    host, port = (folder / ADDRESS_FILE).read_text(encoding="utf-8").split()
    return distributed.TCPStore(
        host, int(port), place.world_size, is_master=False, timeout=timeout, wait_for_workers=False
    )

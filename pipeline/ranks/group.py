"""The processes of a run talking to each other about small things: losses, flags, digests.

Big tensors are the engine's. What goes through here lies on the host and travels over gloo, so it never waits in a
GPU's stream. Every method is collective: all ranks call it, in the same order.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from torch import distributed

from pipeline.ranks.place import Place
from pipeline.ranks.rendezvous import join_group


class Ranks:
    """The process group of a run, joined when this is made.

    Args:
        place: where this process stands.
        timeout_seconds: how long to wait for the others before one of them is taken for dead.

    Raises:
        PeerGone: rank 0 never came.
    """

    def __init__(self, place: Place, *, timeout_seconds: float) -> None:
        self.place = place
        timeout = timedelta(seconds=timeout_seconds)
        cuda = torch.cuda.is_available()
        device = place.local_rank if place.gpu is None or not cuda else place.gpu
        # DeepSpeed and accelerate learn their place from these names alone, whatever started us. By the local rank they
        # choose the GPU; on a CPU DeepSpeed tells the processes of a machine apart by it.
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
        group = distributed.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, distributed.ProcessGroup)  # a number would stand for "not a member"
        self._host_group = group

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Every rank's [k], stacked in rank order: float64 [ranks, k] on the CPU, the same bits on all ranks."""
        mine = values.detach().to("cpu", torch.float64).contiguous()
        everyone = [torch.empty_like(mine) for _ in range(self.place.world_size)]
        distributed.all_gather(everyone, mine, group=self._host_group)
        return torch.stack(everyone)

    def gather_objects(self, value: object) -> list[object]:
        """Every rank's picklable value, in rank order, on all ranks."""
        everyone: list[object] = [None] * self.place.world_size
        distributed.all_gather_object(everyone, value, group=self._host_group)
        return everyone

    def start_any(self, *flags: bool) -> Agreement:
        """Begin to find out which flags are up on any rank; the answer is there when it is asked for."""
        raised = torch.tensor([int(flag) for flag in flags], dtype=torch.int32)
        work = distributed.all_reduce(raised, op=distributed.ReduceOp.MAX, group=self._host_group, async_op=True)
        return Agreement(raised, work)

    def barrier(self) -> None:
        """Wait for all ranks."""
        distributed.barrier(group=self._host_group)

    def leave(self) -> None:
        """Take the process group down."""
        distributed.destroy_process_group()


class Agreement:
    """The pending answer of `Ranks.start_any`."""

    def __init__(self, flags: torch.Tensor, work: distributed.Work | None) -> None:
        self._flags = flags
        self._work = work

    def result(self) -> tuple[bool, ...]:
        """Wait for the answer, the same on every rank: for each flag, whether any rank had it up."""
        if self._work is not None:
            self._work.wait()
        return tuple(bool(flag) for flag in self._flags.tolist())

"""The processes of a run talking to each other about small things: losses, flags, digests.

Big tensors are the engine's. What goes through here lies on the host and travels over gloo, so it never waits in a
GPU's stream. Every method is collective: all ranks call it, in the same order.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from torch import distributed

from pipeline.process import Place


class Ranks:
    """The process group of a run, joined when this is made.

    Args:
        place: where this process stands.
        timeout_seconds: how long to wait for the others before one of them is taken for dead.
    """

    def __init__(self, place: Place, *, timeout_seconds: float) -> None:
        self.place = place
        timeout = timedelta(seconds=timeout_seconds)
        # DeepSpeed and accelerate learn their place from these names alone, whatever started us.
        os.environ.update(
            RANK=str(place.rank),
            WORLD_SIZE=str(place.world_size),
            LOCAL_RANK=str(place.local_rank),
            LOCAL_WORLD_SIZE=str(place.local_world_size),
            LOCAL_SIZE=str(place.local_world_size),
            MASTER_ADDR=place.master_addr,
            MASTER_PORT=str(place.master_port),
        )
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(place.local_rank)
        distributed.init_process_group(
            backend="nccl" if cuda else "gloo",
            init_method=f"tcp://{place.master_addr}:{place.master_port}",
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
        )
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

    def start_any(self, flag: bool) -> Agreement:
        """Begin to find out whether any rank's flag is up; the answer is there when it is asked for."""
        flags = torch.tensor([int(flag)], dtype=torch.int32)
        work = distributed.all_reduce(flags, op=distributed.ReduceOp.MAX, group=self._host_group, async_op=True)
        return Agreement(flags, work)

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

    def result(self) -> bool:
        """Wait for the answer, the same on every rank."""
        if self._work is not None:
            self._work.wait()
        return bool(self._flags.item())

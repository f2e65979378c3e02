"""Join the process group, and exchange small values between ranks (losses, flags, digests).

Uses gloo on the host, never waits in a GPU stream; big tensors are the engine's job. Every method is collective,
called by all ranks in the same order, and takes about log2(ranks) messages in turn. Gathers use Bruck's algorithm (IEEE
TPDS 8(11), 1997): in round k each rank sends the first min(2^k, n - 2^k) of its blocks to the rank 2^k below it. At
1,024 ranks an exchange waits for 10 messages to gloo's ring's 1,023, and a rank holds some 20 connections.

On one machine `shardvit run` gives the ranks a fresh private folder, where rank 0 writes the free port it listens on,
so no other program can take it first. Other launchers' MASTER_ADDR and MASTER_PORT are used unchanged.
"""

import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import torch
from torch import distributed

from shardvit.data_shards.durable import replace_text
from shardvit.data_shards.errors import UserError
from shardvit.pipeline.ranks.place import Place


def rounds(ranks: int) -> int:
    """Count the rounds of one exchange."""
    return (ranks - 1).bit_length()


def gather_rows(group: distributed.ProcessGroup, mine: torch.Tensor, *, tag: int) -> torch.Tensor:
    """Gather CPU tensors of equal shape [k] and type in rank order: [ranks, k]."""
    size, rank = group.size(), group.rank()
    width = mine.numel()
    blocks = torch.empty(size * width, dtype=mine.dtype)
    blocks[:width] = mine.flatten()
    _exchange(group, blocks, ends=[number * width for number in range(size + 1)], tag=tag)
    return blocks.view(size, width).roll(rank, dims=0)  # ours came first


def gather_bytes(group: distributed.ProcessGroup, mine: bytes, *, tag: int) -> list[bytes]:
    """Gather bytes of any length in rank order, in two exchanges: lengths, then content."""
    size, rank = group.size(), group.rank()
    lengths = gather_rows(group, torch.tensor([len(mine)], dtype=torch.int64), tag=tag).flatten().roll(-rank).tolist()
    ends = [0, *accumulate(lengths)]
    blocks = torch.empty(ends[-1], dtype=torch.uint8)
    if mine:
        blocks[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    _exchange(group, blocks, ends=ends, tag=tag)
    content = blocks.numpy().tobytes()
    return [content[ends[at] : ends[at + 1]] for at in ((other - rank) % size for other in range(size))]


def _exchange(group: distributed.ProcessGroup, blocks: torch.Tensor, *, ends: Sequence[int], tag: int) -> None:
    """Fill `blocks` after our own, the first: block i, `ends[i]` to `ends[i + 1]`, comes from the rank i above us."""
    size, rank = group.size(), group.rank()
    have = 1
    while have < size:
        count = min(have, size - have)
        pending: list[distributed.Work] = []
        # Both sides sum over the same blocks, so they agree on skipping an empty message.
        if ends[count]:
            pending.append(group.send([blocks[: ends[count]]], (rank - have) % size, tag))
        if ends[have + count] > ends[have]:
            pending.append(group.recv([blocks[ends[have] : ends[have + count]]], (rank + have) % size, tag))
        for each in pending:
            each.wait()
        have += count


Value = TypeVar("Value")

ADDRESS_FILE = "address"
_POLL_SECONDS = 0.02
# Up to here each rank connects to all others, and the next exchange notices any peer's death.
_MOST_MESHED = 64
_LAZY = "TORCH_GLOO_LAZY_INIT"  # torch reads it when a group is made
_TAGS = 2**30
_LOOPBACKS = (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6))


class PeerGone(RuntimeError):
    """Another process of the run died or never came."""


class Ranks:
    """Joins the process group; PeerGone if rank 0 never comes. Exchanges fail after `timeout_seconds`."""

    def __init__(self, place: Place, *, timeout_seconds: float) -> None:
        self.place = place
        cuda = torch.cuda.is_available()
        device = place.local_rank if place.gpu is None or not cuda else place.gpu
        # Read by DeepSpeed and accelerate. LOCAL_RANK selects the GPU; on a CPU DeepSpeed needs it to tell a machine's
        # processes apart.
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
        gpu = torch.device("cuda", device) if cuda else None
        join_group(place, backend="nccl" if cuda else "gloo", timeout_seconds=timeout_seconds, gpu=gpu)
        lazily = place.world_size > _MOST_MESHED and _LAZY not in os.environ  # unless set by the user
        if lazily:
            os.environ[_LAZY] = "1"
        try:
            group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        finally:
            if lazily:
                del os.environ[_LAZY]
        assert isinstance(group, distributed.ProcessGroup)  # an int would mean "not a member"
        self._host_group = group
        self._exchanges = 0
        if place.world_size > _MOST_MESHED:
            # Connect all ranks that will ever exchange messages, so a death shows as a closed connection.
            self.gather(torch.zeros(1))
            self.barrier()

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Gather [k] from each rank, in rank order: float64 [ranks, k] on the CPU, equal bits on all ranks."""
        return gather_rows(self._host_group, values.detach().to("cpu", torch.float64), tag=self._tag())

    def gather_objects(self, value: Value) -> list[Value]:
        return [pickle.loads(each) for each in gather_bytes(self._host_group, pickle.dumps(value), tag=self._tag())]

    def from_main(self, value: Value) -> Value:
        """Broadcast rank 0's picklable value over a tree, ignoring the others'."""
        if self.place.world_size == 1:
            return value
        content = bytearray(pickle.dumps(value, protocol=5) if self.place.is_main else b"")
        length = torch.tensor([len(content)], dtype=torch.int64)
        distributed.broadcast(length, src=0, group=self._host_group)
        sent = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(int(length), dtype=torch.uint8)
        distributed.broadcast(sent, src=0, group=self._host_group)
        return value if self.place.is_main else pickle.loads(sent.numpy().data)

    def barrier(self) -> None:
        distributed.barrier(group=self._host_group)

    def leave(self) -> None:
        distributed.destroy_process_group()

    def _tag(self) -> int:
        self._exchanges = (self._exchanges + 1) % _TAGS
        return self._exchanges


def join_group(place: Place, *, backend: str, timeout_seconds: float, gpu: torch.device | None = None) -> None:
    """Make the default process group; PeerGone if a rank does not come in time."""
    timeout = timedelta(seconds=timeout_seconds)
    store, address = None, None
    if place.world_size == 1:
        _loopback()
        store = distributed.HashStore()
    elif place.rendezvous is not None:
        store = _store_in(place.rendezvous, place=place, timeout=timeout)
    else:
        address = f"tcp://{place.master_addr}:{place.master_port}"
    try:
        distributed.init_process_group(
            backend,
            address,
            timeout,
            world_size=place.world_size,
            rank=place.rank,
            store=store,
            device_id=gpu,  # NCCL connects now, not in the first step, and need not guess the GPU
        )
    except distributed.DistError as error:
        if address is None:
            raise
        raise PeerGone(
            f"the {place.world_size} processes did not meet at {place.master_addr}:{place.master_port} "
            f"(MASTER_ADDR, MASTER_PORT) within {timeout_seconds:.0f} seconds (engine.collective_timeout_seconds): "
            f"{str(error).splitlines()[0]}"
        ) from error


def _loopback() -> str:
    """Find a working loopback address. UserError if there is none, which torch would take minutes to notice."""
    for address, family in _LOOPBACKS:
        with suppress(OSError), socket.create_server((address, 0), family=family) as server:
            socket.create_connection(server.getsockname()[:2], timeout=5.0).close()  # a firewall may drop it
            if address == "::1":
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo's default is only 127.0.0.1
            return address
    raise UserError(
        "this machine cannot connect to itself, neither at 127.0.0.1 nor at ::1, as processes that train must: set its "
        "loopback interface up, as root by `ip link set lo up`"
    )


def _store_in(folder: Path, *, place: Place, timeout: timedelta) -> distributed.TCPStore:
    here = _loopback() if place.world_size == place.local_world_size else place.master_addr
    if place.is_main:
        store = distributed.TCPStore(here, 0, place.world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        replace_text(folder / ADDRESS_FILE, f"{here} {store.port}", sync="none")
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


_TURN_SECONDS = 1.0


def while_others_wait(ranks: Ranks, work: Callable[[], None]) -> None:
    """Run `work` on rank 0; collective. Its exceptions are raised only there. RuntimeError if a process dies."""
    if ranks.place.world_size == 1:
        return work()
    if not ranks.place.is_main:
        while not ranks.gather_objects(False)[0]:
            pass
        return None
    is_over = threading.Event()
    trouble: list[RuntimeError] = []

    def answer() -> None:
        try:
            while not ranks.gather_objects(is_over.wait(_TURN_SECONDS))[0]:
                pass
        except RuntimeError as error:  # from gloo, if a process died
            trouble.append(error)

    thread = threading.Thread(target=answer, daemon=True, name="others-wait")
    thread.start()
    try:
        work()
    finally:
        is_over.set()
        thread.join()
    if trouble:
        raise trouble[0]

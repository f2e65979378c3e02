"""All-gather of small values over point-to-point messages, in ceil(log2 n) rounds where gloo's ring takes n - 1.

Bruck's algorithm (IEEE TPDS 8(11), 1997): in round k each rank sends the min(2^k, n - 2^k) blocks that it has to the
rank 2^k below it, and receives as many from the rank 2^k above. So a rank only ever talks to 2 ceil(log2 n) others, and
at 1,024 ranks an exchange waits for 10 messages, not for 1,023. Each rank still receives every other's block once.

For exchanges of some kilobytes, where latency counts; for large tensors a ring is as good. Every rank calls these in
the same order; `tag` tells one exchange from the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch


class _Pending(Protocol):
    def wait(self) -> object: ...


class Messages(Protocol):
    """What is used of a process group: point-to-point messages on the host."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: list[torch.Tensor], dst: int, tag: int, /) -> _Pending: ...
    def recv(self, tensors: list[torch.Tensor], src: int, tag: int, /) -> _Pending: ...


def rounds(ranks: int) -> int:
    """Rounds of one exchange between so many ranks."""
    return (ranks - 1).bit_length()


def gather_rows(group: Messages, mine: torch.Tensor, *, tag: int) -> torch.Tensor:
    """Every rank's [k] (the same k and type, on the CPU) in rank order: [ranks, k]."""
    size, rank = group.size(), group.rank()
    width = mine.numel()
    blocks = torch.empty(size * width, dtype=mine.dtype)
    blocks[:width] = mine.flatten()
    _exchange(group, blocks, ends=[number * width for number in range(size + 1)], tag=tag)
    return blocks.view(size, width).roll(rank, dims=0)  # ours came first


def gather_bytes(group: Messages, mine: bytes, *, tag: int) -> list[bytes]:
    """Every rank's bytes, of any length, in rank order. Two exchanges: the lengths come first."""
    size, rank = group.size(), group.rank()
    lengths = gather_rows(group, torch.tensor([len(mine)], dtype=torch.int64), tag=tag).flatten().roll(-rank).tolist()
    ends = [0, *accumulate(lengths)]
    blocks = torch.empty(ends[-1], dtype=torch.uint8)
    if mine:
        blocks[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    _exchange(group, blocks, ends=ends, tag=tag)
    content = blocks.numpy().tobytes()
    return [content[ends[at] : ends[at + 1]] for at in ((other - rank) % size for other in range(size))]


def _exchange(group: Messages, blocks: torch.Tensor, *, ends: Sequence[int], tag: int) -> None:
    """Fill `blocks`: block i, from `ends[i]` to `ends[i + 1]`, is that of the rank i above this one; ours is there."""
    size, rank = group.size(), group.rank()
    have = 1
    while have < size:
        count = min(have, size - have)
        pending: list[_Pending] = []
        # The sum over the same blocks on both sides, so either both send and receive nothing or neither does.
        if ends[count]:
            pending.append(group.send([blocks[: ends[count]]], (rank - have) % size, tag))
        if ends[have + count] > ends[have]:
            pending.append(group.recv([blocks[ends[have] : ends[have + count]]], (rank + have) % size, tag))
        for each in pending:
            each.wait()
        have += count

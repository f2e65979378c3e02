"""Measure the weight norm, and the relative size of a step's update, from the float32 masters.

A measured step copies this process's masters (4 bytes a parameter, freed after the step): about four passes over them.
Nothing reaches the host before `take`. With offloaded masters, or no memory for the copy, only the norm is measured.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from shardvit.pipeline.ranks.group import Ranks


class WeightNorms:
    """Measures the steps run within `around`. `masters`: this process's trained float32 weights, without padding."""

    def __init__(self, masters: Sequence[Tensor], *, kept: Literal["whole", "shard"]) -> None:
        self._masters = [each.detach().view(-1) for each in masters]
        self._kept = kept
        self._has_room = True
        self._squares: Tensor | None = None  # of the weights and of their change, float64 [2]; nan: not measured

    @contextlib.contextmanager
    def around(self, *, device: torch.device) -> Iterator[None]:
        before = self._copied(device=device)
        yield
        with torch.no_grad():
            weights = _sum_of_squares(self._masters, device=device)
            if before is None:
                change = torch.full_like(weights, math.nan)
            else:
                if before:
                    torch._foreach_sub_(before, self._masters)
                change = _sum_of_squares(before, device=device)
            self._squares = torch.stack([weights, change])

    def take(self, ranks: Ranks) -> dict[str, float]:
        """Return the weights' L2 norm and the update's norm over it, {} if not measured; collective."""
        if self._squares is None:
            return {}
        mine, self._squares = self._squares, None
        every = ranks.gather(mine) if self._kept == "shard" else mine.cpu()[None]
        weights, change = (math.sqrt(each) for each in every.sum(dim=0).tolist())
        found = {"opt/parameter_norm": weights}
        if math.isfinite(change) and weights:
            found["opt/update_ratio"] = change / weights
        return found

    @torch.no_grad()
    def _copied(self, *, device: torch.device) -> list[Tensor] | None:
        """None if offloaded or out of memory."""
        if not self._has_room or any(each.device.type != device.type for each in self._masters):
            return None
        sizes = [each.numel() for each in self._masters]
        try:
            flat = torch.empty(sum(sizes), dtype=torch.float32, device=device)
        except torch.OutOfMemoryError:
            self._has_room = False  # do not retry: each attempt empties the allocator's cache
            return None
        pieces = list(flat.split(sizes)) if sizes else []
        if pieces:
            torch._foreach_copy_(pieces, self._masters)
        return pieces


def _sum_of_squares(tensors: Sequence[Tensor], *, device: torch.device) -> Tensor:
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(list(tensors))).double().square().sum().to(device, non_blocking=True)

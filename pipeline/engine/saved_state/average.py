"""Average the weights over the steps (EMA, Polyak averaging): one float32 tensor per master weight.

Costs 4 bytes a parameter, sharded like the masters, and one pass over both after each step. Does not average buffers,
import DeepSpeed or communicate.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardvit.pipeline.recipe.stages.train_stage import EmaConfig

AVERAGE = "average"  # its name next to moments in a saved state
Number = TypeVar("Number", float, Tensor)
_EXCHANGED_ELEMENTS = 1 << 24  # at a time: takes 64 MiB


def average_file(rank: int) -> str:
    """Name a rank's file; rank 0's covers everything if each process holds all."""
    return f"average_rank_{rank}.pt"


def decay_at(updates: Number, *, config: EmaConfig) -> Number | float:
    """Decay as in tf.train.ExponentialMovingAverage (`num_updates`) and timm.utils.ModelEmaV3 (`use_warmup`)."""
    match config.warmup:
        case "none":
            return config.decay
        case "tensorflow":
            return _at_most(config.decay, (1 + updates) / (10 + updates))
        case "timm":
            return _at_most(config.decay, 1 - (1 + updates) ** (-2 / 3))


def _at_most(limit: float, value: Any) -> Any:
    return value.clamp(max=limit) if isinstance(value, Tensor) else min(limit, value)


class WeightAverage:
    """Float32 averages of `masters`, starting as copies; the file uses the keys of `masters`."""

    def __init__(self, masters: Mapping[str, Tensor], *, config: EmaConfig) -> None:
        self._config = config
        self._keys = tuple(masters)
        self._masters = list(masters.values())
        device = self._masters[0].device if self._masters else torch.device("cpu")  # a rank may hold nothing
        self._updates = torch.zeros((), dtype=torch.float64, device=device)
        self._averages = [master.detach().clone() for master in self._masters]
        self._by_master = dict(zip(map(id, self._masters), self._averages, strict=True))

    @property
    def updates(self) -> int:
        """Applied steps averaged so far; reading it waits for the device."""
        return int(self._updates)

    @updates.setter
    def updates(self, count: int) -> None:
        self._updates.fill_(count)

    @torch.no_grad()
    def update(self, *, applied: Tensor) -> None:
        """Set average <- decay * average + (1 - decay) * master where the scalar `applied` (on the device) is 1."""
        applied = applied.to(self._updates.device)  # offloaded masters are on the host
        weight = applied * (1 - decay_at(self._updates, config=self._config))
        weights = [weight.float()] * len(self._averages)
        torch._foreach_lerp_(self._averages, [master.detach() for master in self._masters], weights)
        self._updates += applied

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap masters and averages in place; twice restores both to the last bit."""
        for master, average in zip(self._masters, self._averages, strict=True):
            pieces = (each.detach().view(-1).split(_EXCHANGED_ELEMENTS) for each in (master, average))
            for one, other in zip(*pieces, strict=True):
                kept = one.clone()
                one.copy_(other)
                other.copy_(kept)

    def of(self, master: Tensor) -> Tensor:
        return self._by_master[id(master)]

    def restart(self) -> None:
        for master, average in zip(self._masters, self._averages, strict=True):
            average.copy_(master.detach())
        self.updates = 0

    def state(self) -> dict[str, Any]:
        """Content of the checkpoint file; shares memory."""
        return {"updates": self.updates, "averages": dict(zip(self._keys, self._averages, strict=True))}

"""Held-out metrics of the user's own: functions of each image, and classes for what is no mean over images.

A function maps (outputs float32 [n, ...], targets) to a value per image, [n]; the metric is their mean over every image
exactly once, summed in set order and rounded once: the same bits on any number of processes. A class has `update`
(the same arguments, without padding and damaged images), `merge` (another process's instance, in set order) and
`compute`. Costs 8 bytes an image and function; of a class, what it keeps: a view keeps all outputs of its batch.
"""

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.loading.batch import Batch
from shardvit.pipeline.stage.pixels import to_device


class Gather(Protocol):
    """Methods of the process group that metrics use."""

    def gather(self, values: torch.Tensor) -> torch.Tensor: ...

    def gather_objects(self, value: Any) -> list[Any]: ...


class OwnMetrics:
    """The own metrics of one evaluation on one process; `codes`: functions and classes by name."""

    def __init__(self, codes: Mapping[str, Any]) -> None:
        self._functions = {name: each for name, each in codes.items() if not isinstance(each, type)}
        self._counters = {name: each() for name, each in codes.items() if isinstance(each, type)}
        self._columns: list[torch.Tensor] = []  # by batch: float64 [rows, functions], on the device

    def update(self, batch: Batch, outputs: torch.Tensor, targets: Any) -> None:
        """Add a batch, without waiting for the device."""
        columns: list[torch.Tensor] = []
        for name, function in self._functions.items():
            found: Any = function(outputs, targets)
            if not isinstance(found, torch.Tensor) or found.shape != (len(outputs),):
                what = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
                raise UserError(f"metric {name}: it gives {what}, not a tensor of a value per image, [{len(outputs)}]")
            columns.append(found.detach().double())
        if columns:
            self._columns.append(torch.stack(columns, dim=1))
        if self._counters and batch.counted.any():
            if not batch.counted.all():
                rows = to_device(batch.counted.nonzero()[:, 0], outputs.device)
                outputs, targets = tree_map_only(torch.Tensor, lambda each: each[rows], (outputs, targets))
            for counter in self._counters.values():
                counter.update(outputs, targets)

    def results(self, samples: torch.Tensor, *, ranks: Gather) -> dict[str, float]:
        """Return each metric by name; `samples`: float64 [rows], this process's images in the set, -1 for those that do
        not count; collective. NaN without images."""
        values: dict[str, float] = {}
        if self._functions:
            mine = torch.cat([samples[:, None], torch.cat(self._columns).cpu()], dim=1)
            rows = ranks.gather(mine.flatten()).view(-1, mine.shape[1])
            rows = rows[rows[:, 0] >= 0]
            for name, column in zip(self._functions, rows.T[1:].tolist(), strict=True):
                values[name] = math.fsum(column) / len(column) if column else math.nan
        for name, counter in self._counters.items():
            state = tree_map_only(torch.Tensor, torch.Tensor.cpu, vars(counter))
            whole, *others = (_restored(type(counter), each) for each in ranks.gather_objects(state))
            for other in others:
                whole.merge(other)
            values[name] = float(whole.compute())
        return values


def _restored(kind: Any, state: dict[str, Any]) -> Any:
    made = kind.__new__(kind)
    vars(made).update(state)
    return made

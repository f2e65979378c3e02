"""The steps' losses between two points of the curve: kept on the device, reduced over the ranks when they are needed.

No step waits for a number. Reducing gathers every rank's values and adds them in rank order in float64, so the curve
does not depend on how many steps are reduced together: an interrupted and resumed run draws the same bits.
"""

from __future__ import annotations

import torch

from pipeline.ranks.group import Ranks


class LossWindow:
    """Losses of the steps since the last point of the curve.

    Args:
        losses: global means carried over from a checkpoint.
    """

    def __init__(self, losses: list[float]) -> None:
        self._global = list(losses)
        self._local: list[torch.Tensor] = []
        self._micro: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor) -> None:
        """One micro-batch's mean loss on this rank."""
        self._micro.append(loss.detach().double())

    def end_step(self) -> None:
        """The micro-batches added since the last call make up one step."""
        self._local.append(torch.stack(self._micro).mean())
        self._micro.clear()

    def reduce(self, ranks: Ranks) -> list[float]:
        """The global mean loss of every step in the window; collective."""
        if self._local:
            everyone = ranks.gather(torch.stack(self._local))
            total = everyone[0].clone()
            for row in everyone[1:]:  # not .mean(dim=0): its order of addition depends on the number of steps
                total += row
            self._global += (total / len(everyone)).tolist()
            self._local.clear()
        return list(self._global)

    def take(self, ranks: Ranks) -> list[float]:
        """The global mean losses of the window's steps; it is empty then; collective."""
        losses = self.reduce(ranks)
        self._global.clear()
        return losses

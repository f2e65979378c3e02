"""timm's LAMB, imported only for a recipe that names it."""

from __future__ import annotations

from collections.abc import Callable

from timm.optim import Lamb


class CountingLamb(Lamb):
    """timm's LAMB; a step without gradients, such as the engines make of one that is not finite, is not counted."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Same arguments as timm's."""
        if any(parameter.grad is not None for group in self.param_groups for parameter in group["params"]):
            return super().step(closure)
        return None

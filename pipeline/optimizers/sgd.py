"""SGD with momentum and decoupled weight decay, p <- p - lr * wd * p: torch's fused one, and one with a bf16 momentum.

torch adds wd * p to the gradient, which a momentum of 0.9 multiplies by ten. Both are elementwise, so ZeRO may cut
parameters anywhere.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from shardvit.pipeline.optimizers.pieces import Chunk, PieceOptimizer, StepTerms


class DecoupledSgd(torch.optim.SGD):
    """torch's, fused; reads `grad_scale` and `found_inf`."""

    def __init__(self, groups: Any, *, lr: float, momentum: float) -> None:
        super().__init__(groups, lr=lr, momentum=momentum, fused=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        skipped = getattr(self, "found_inf", None)
        decays = [float(group["weight_decay"]) for group in self.param_groups]
        try:
            for group, decay in zip(self.param_groups, decays, strict=True):
                moved = [parameter for parameter in group["params"] if parameter.grad is not None]
                for parameter in moved:
                    if group["momentum"] and "momentum_buffer" not in self.state[parameter]:
                        # torch would leave it uninitialised if its first step is skipped.
                        self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
                if decay and moved:
                    lost = group["lr"] * decay
                    torch._foreach_mul_(moved, 1 - lost if skipped is None else 1 - lost * (1 - skipped))
                group["weight_decay"] = 0.0  # leaves torch only the momentum
            super().step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay


class PieceSgd(PieceOptimizer):
    """For a momentum in bf16, or many learning rates; in float32 a `momentum` of 0 has no state, as with torch."""

    moment: ClassVar = "momentum_buffer"

    def start(self, parameter: Tensor, shape: tuple[int, ...] | None) -> dict[str, Tensor]:
        if not self.defaults["momentum"] and self.moment_type == torch.float32:
            return {}
        return {self.moment: torch.zeros_like(parameter, dtype=self.moment_type, requires_grad=False)}

    def descend(self, chunk: Chunk, change: Tensor, terms: StepTerms) -> None:
        update = chunk.gradient(terms)
        if chunk.states[0]:
            update = self.moved(chunk, update, keep=self.defaults["momentum"], add=1.0, terms=terms)
        change.sub_(update)

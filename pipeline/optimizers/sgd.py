"""SGD with momentum and decoupled weight decay, p <- p - lr * wd * p; torch adds wd * p to the gradient, which a
momentum of 0.9 multiplies by ten. Elementwise, so ZeRO may cut parameters anywhere."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from shardvit.pipeline.optimizers.pieces import Chunk, PieceOptimizer, StepTerms, rounded


class Sgd(PieceOptimizer):
    """Update the momentum and a copy of the weights by torch's fused kernel. A momentum kept in bf16 is applied in
    float32 and decays by a factor rounded to bf16, as in optax. A `momentum` of 0 in float32 keeps no state."""

    moment: ClassVar = "momentum_buffer"

    def start(self, parameter: Tensor, shape: tuple[int, ...] | None) -> dict[str, Tensor]:
        if not self.defaults["momentum"] and self.moment_type == torch.float32:
            return {}
        return {self.moment: torch.zeros_like(parameter, dtype=self.moment_type, requires_grad=False)}

    def descend(self, chunk: Chunk, change: Tensor, terms: StepTerms) -> None:
        moments = chunk.state(self.moment) if chunk.states[0] else []
        rounds = moments and self.moment_type != torch.float32
        exact = chunk.cut(torch.cat(moments).float()) if rounds else moments
        plain: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}
        own = {"momentum": rounded(self.defaults["momentum"], self.moment_type), "is_first_step": False}
        verdict = {"grad_scale": terms.divisor, "found_inf": terms.skip}
        torch._fused_sgd_(chunk.cut(change), chunk.gradients, exact, **plain, **own, **verdict)
        if rounds:
            torch._foreach_copy_(moments, exact)

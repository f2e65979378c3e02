"""AdamW for what torch's fused one does not do, and LAMB: a bf16 moment, many learning rates, trust ratios.

torch's kernel moves the moments and, at a learning rate of 1, a copy of the weights times minus their decay; that is
multiplied by the learning rates and added to the weights. So decay and update are rounded once, together.

With the first moment in bf16, as in Google's recipes, a step applies it in float32, and rounds it to store it (optax's
`mu_dtype`). As in optax, its decay is rounded too: 0.9 becomes 0.8984375, so in the long run steps are 1.5 % shorter.
AdamW is elementwise, so ZeRO may cut parameters anywhere.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from shardvit.pipeline.optimizers.pieces import Chunk, PieceOptimizer, StepTerms, rounded


class PieceAdamW(PieceOptimizer):
    """AdamW (Loshchilov and Hutter; decay times learning rate); has the defaults `betas` and `eps`."""

    moment: ClassVar = "exp_avg"

    def start(self, parameter: Tensor, shape: tuple[int, ...] | None) -> dict[str, Tensor]:
        return {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, dtype=self.moment_type, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }

    def descend(self, chunk: Chunk, change: Tensor, terms: StepTerms) -> None:
        (beta1, beta2), moments = self.defaults["betas"], chunk.state("exp_avg")
        exact = moments
        if self.moment_type != torch.float32:
            excess = rounded(beta1, self.moment_type) / beta1 - 1 if beta1 else 0.0
            exact = chunk.cut(torch.cat(moments).float().mul_(terms.applied * excess + 1))
        plain: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0, "amsgrad": False, "maximize": False}
        own = {"beta1": beta1, "beta2": beta2, "eps": self.defaults["eps"]}
        verdict = {"grad_scale": terms.divisor, "found_inf": terms.skip}
        seconds, steps = chunk.state("exp_avg_sq"), chunk.state("step")
        torch._fused_adamw_(chunk.cut(change), chunk.gradients, exact, seconds, [], steps, **plain, **own, **verdict)
        if exact is not moments:
            torch._foreach_copy_(moments, exact)


class Lamb(PieceAdamW):
    """LAMB (You et al., arXiv 1904.00962) without limits on the trust ratio. A group that `adapts` has one for each of
    its parameters' `parts`: q, k and v of a fused kernel have one each, as where they are parameters of their own."""

    def shape(self, group: dict[str, Any], number: int) -> tuple[int, ...] | None:
        return (group["params"][number].numel() // group["parts"][number],) if group["adapts"] else None

    def descend(self, chunk: Chunk, change: Tensor, terms: StepTerms) -> None:
        super().descend(chunk, change, terms)
        if chunk.shape is not None:
            rows = change.view(-1, *chunk.shape)
            weight, update = torch.stack(torch._foreach_norm(chunk.weights)), torch.linalg.vector_norm(rows, dim=1)
            rows.mul_(torch.where(torch.minimum(weight, update) > 0, weight / update, 1.0).unsqueeze(1))

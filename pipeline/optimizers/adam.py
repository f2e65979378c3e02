"""AdamW for what torch's fused one does not do, and LAMB: a bf16 moment, many learning rates, trust ratios.

torch's kernel moves the moments and, at a learning rate of 1, a copy of the weights times minus their decay; that is
multiplied by the learning rates and added to the weights. So decay and update are rounded once, together.

With the first moment in bf16, as in Google's recipes, a step applies it in float32, and rounds it to store it (optax's
`mu_dtype`). As in optax, its decay is rounded too: 0.9 becomes 0.8984375, so in the long run steps are 1.5 % shorter.
AdamW is elementwise, so ZeRO may cut parameters anywhere.
"""

from typing import Any

import torch
from torch import Tensor

from shardvit.pipeline.optimizers.pieces import Chunk, PieceOptimizer, StepTerms, rounded


class PieceAdamW(PieceOptimizer):
    """AdamW (Loshchilov and Hutter; decay times learning rate)."""

    def __init__(
        self, groups: Any, *, lr: float, betas: tuple[float, float], eps: float, moment_type: torch.dtype
    ) -> None:
        super().__init__(groups, moment="exp_avg", moment_type=moment_type, lr=lr, betas=betas, eps=eps)

    def start(self, parameter: Tensor, shape: tuple[int, ...] | None) -> dict[str, Tensor]:
        return adam_start(parameter, moment_type=self.moment_type)

    def descend(self, chunk: Chunk, change: Tensor, terms: StepTerms) -> None:
        betas, eps = self.defaults["betas"], self.defaults["eps"]
        adam_descend(chunk, change, terms, betas=betas, eps=eps, moment_type=self.moment_type)


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
            ratio = torch.where(torch.minimum(weight, update) > 0, weight / update, 1.0)
            rows.mul_(ratio.unsqueeze(1))


def adam_start(parameter: Tensor, *, moment_type: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Make Adam's state before the first step."""
    return {
        "step": torch.zeros((), device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, dtype=moment_type, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
    }


def adam_descend(
    chunk: Chunk,
    change: Tensor,
    terms: StepTerms,
    *,
    betas: tuple[float, float],
    eps: float,
    moment_type: torch.dtype = torch.float32,
) -> None:
    """Move Adam's moments, and subtract its update from `change`: see `PieceOptimizer.descend`."""
    moments = exact = chunk.state("exp_avg")
    beta1, beta2 = betas
    if moment_type != torch.float32:
        excess = rounded(beta1, moment_type) / beta1 - 1 if beta1 else 0.0
        exact = chunk.cut(torch.cat(moments).float().mul_(terms.applied * excess + 1))
    torch._fused_adamw_(
        chunk.cut(change),
        chunk.gradients,
        exact,
        chunk.state("exp_avg_sq"),
        [],
        chunk.state("step"),
        lr=1.0,
        beta1=beta1,
        beta2=beta2,
        weight_decay=0.0,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=terms.divisor,
        found_inf=terms.skip,
    )
    if exact is not moments:
        torch._foreach_copy_(moments, exact)

"""big_vision's Adafactor: factored second moment, momentum in bf16, no update clipping.

From Zhai et al., Scaling Vision Transformers (arXiv 2106.04560, section 3.4) and big_vision's `optax.py`: the decay at
step t is min(0.999, 1 - t^-0.8); the learning rate is not scaled by the parameter's size. Takes whole parameters; costs
2 bytes a parameter to AdamW's 8. timm's `AdafactorBigVision` differs: it averages the momentum in bf16, applies the
rounded value, and factors dimensions from 16 up, not 32.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from shardvit.pipeline.optimizers.pieces import Chunk, PieceOptimizer, StepTerms, rounded

_DECAY_POWER = 0.8
_MOST_DECAY = 0.999
_LEAST_FACTORED = 32  # minimum of the second largest dimension
_EPS = 1e-30


class BigVisionAdafactor(PieceOptimizer):
    """A group's `shapes` are those its parameters are factored in; flax gives attention's a heads dimension."""

    moment: ClassVar = "exp_avg"

    def shape(self, group: dict[str, Any], number: int) -> tuple[int, ...] | None:
        shape = tuple(group["shapes"][number])
        return None if _factored_dimensions(shape) is None else shape

    def start(self, parameter: Tensor, shape: tuple[int, ...] | None) -> dict[str, Tensor]:
        momentum = torch.zeros_like(parameter, dtype=self.moment_type, requires_grad=False)
        state = {"exp_avg": momentum, "step": torch.zeros((), device=parameter.device)}
        if shape is None:
            return {**state, "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False)}
        for name, dimension in zip(_FACTORS, reversed(_factored_dimensions(shape) or ()), strict=True):
            sizes = [1 if number == dimension else size for number, size in enumerate(shape)]
            state[name] = torch.zeros(sizes, device=parameter.device)
        return state

    def descend(self, chunk: Chunk, change: Tensor, terms: StepTerms) -> None:
        gradient = chunk.gradient(terms)
        steps = chunk.states[0]["step"].clamp(min=1)  # 0 if the very first step is skipped
        add = steps.pow_(-_DECAY_POWER).clamp_(min=1 - _MOST_DECAY).mul_(terms.applied)
        scaled = _scaled(gradient.view(-1, *(chunk.shape or ())), chunk, add=add).view(-1)
        scaled.masked_fill_(terms.skipped, 0.0)  # nan before the first step
        momentum, averages = self.defaults["momentum"], chunk.state("exp_avg")
        kept = terms.skip.clamp(min=rounded(momentum, self.moment_type))  # as in optax
        exact = torch.cat(averages).float().mul_(kept).add_(scaled, alpha=1 - momentum)
        torch._foreach_copy_(averages, chunk.cut(exact))
        change.sub_(exact)


_FACTORS = ("exp_avg_sq_row", "exp_avg_sq_column")


def _scaled(gradients: Tensor, chunk: Chunk, *, add: Tensor) -> Tensor:
    """Update the second moment with weight `add`, and divide the gradients by its root."""
    squares = gradients.square().add_(_EPS)
    if chunk.shape is None:
        return gradients.mul_(_lerped(chunk.state("exp_avg_sq"), squares, add=add).rsqrt_())
    smaller, larger = (1 + each for each in _factored_dimensions(chunk.shape) or ())
    rows, columns = (
        _lerped(chunk.state(name), squares.mean(dim=dimension, keepdim=True), add=add)
        for name, dimension in zip(_FACTORS, (larger, smaller), strict=True)
    )
    return gradients.mul_((rows / rows.mean(dim=smaller, keepdim=True)).rsqrt_()).mul_(columns.rsqrt_())


def _lerped(averages: list[Tensor], values: Tensor, *, add: Tensor) -> Tensor:
    """Move averages towards values joined in their order; returns them joined."""
    joined = torch.cat([each.view(-1) for each in averages]).view_as(values).lerp_(values, add)
    pieces = joined.view(-1).split([each.numel() for each in averages])
    torch._foreach_copy_(averages, [piece.view_as(each) for piece, each in zip(pieces, averages, strict=True)])
    return joined


def _factored_dimensions(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the second largest and the largest dimension; None if too small to factor."""
    if len(shape) < 2:
        return None
    *_, smaller, larger = sorted(range(len(shape)), key=lambda dimension: shape[dimension])
    return (smaller, larger) if shape[smaller] >= _LEAST_FACTORED else None

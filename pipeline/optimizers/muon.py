"""Muon (Keller Jordan): momentum orthogonalised by Newton-Schulz, for a batch of equal matrices at a time.

As timm's, with Nesterov momentum, iterations in bf16, and updates scaled like AdamW's (arXiv 2502.16982), so that AdamW
on the other parameters shares learning rate and decay. Takes whole parameters, a convolution as a matrix of outputs.
"""

from typing import Any

import torch
from torch import Tensor

from shardvit.pipeline.optimizers.adam import PieceAdamW
from shardvit.pipeline.optimizers.pieces import Chunk, StepTerms

_BUFFER = "momentum_buffer"
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_LEAST_NORM = 1e-7
_RMS = 0.2  # of AdamW's updates


class Muon(PieceAdamW):
    """A group is `orthogonal`, or has AdamW; has the default `momentum` too."""

    def shape(self, group: dict[str, Any], number: int) -> tuple[int, ...] | None:
        parameter = group["params"][number]
        return (parameter.shape[0], parameter[0].numel()) if group["orthogonal"] else None

    def start(self, parameter: Tensor, shape: tuple[int, ...] | None) -> dict[str, Tensor]:
        return {_BUFFER: torch.zeros_like(parameter.detach())} if shape else super().start(parameter, shape)

    def descend(self, chunk: Chunk, change: Tensor, terms: StepTerms) -> None:
        if chunk.shape is None:
            super().descend(chunk, change, terms)
            return
        matrices = self.ahead(chunk, terms).view(-1, *chunk.shape)
        change.view_as(matrices).sub_(orthogonalised(matrices), alpha=scale_of(chunk.shape))

    def ahead(self, chunk: Chunk, terms: StepTerms) -> Tensor:
        """Move the momentum, and join it a step ahead (Nesterov)."""
        gradient, momentum = chunk.gradient(terms), self.defaults["momentum"]
        moved = torch.cat(chunk.state(_BUFFER)).lerp_(gradient, terms.applied * (1 - momentum))
        torch._foreach_copy_(chunk.state(_BUFFER), chunk.cut(moved))
        return gradient.lerp_(moved, momentum)


def scale_of(shape: tuple[int, ...]) -> float:
    """Return the factor that makes an orthogonal update of a matrix as large as AdamW's."""
    return _RMS * max(shape) ** 0.5


def orthogonalising_flops(shape: tuple[int, ...]) -> float:
    """Count those of one matrix: in each iteration two products with the larger dimension, and one of squares."""
    smaller, larger = sorted(shape)
    return _ITERATIONS * (4.0 * smaller**2 * larger + 2.0 * smaller**3)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Bring the singular values of [n, rows, columns] near 1; bf16."""
    wide = matrices.bfloat16()
    wide = wide.mT if wide.shape[1] > wide.shape[2] else wide
    wide = wide / wide.norm(2, dim=(-2, -1), keepdim=True).clamp_(min=_LEAST_NORM)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = torch.bmm(wide, wide.mT)
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if matrices.shape[1] > matrices.shape[2] else wide

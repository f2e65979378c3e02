"""big_vision's variant of Adafactor: a factored second moment, momentum in bf16, no clipping of the update.

From Zhai et al., Scaling Vision Transformers (arXiv 2106.04560, section 3.4) and big_vision's `optax.py`: the decay at
step t is min(0.999, 1 - t^-0.8); the learning rate is not scaled by the parameter's size. 2 bytes of a parameter in
place of AdamW's 8. Takes whole parameters. timm's `AdafactorBigVision` differs: it averages the momentum in bf16
itself, moves the weights by the rounded value, and factors from dimensions of 16, not 32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.optimizers.bf16_moment import MomentInItsType

_DECAY_POWER = 0.8
_MOST_DECAY = 0.999
_LEAST_FACTORED = 32  # the two largest dimensions of what is factored have at least this size
_EPS = 1e-30


class BigVisionAdafactor(MomentInItsType):
    """`shapes` of a group: those in which its parameters are factored; flax gives attention's a dimension of heads."""

    def __init__(self, groups: Any, *, lr: float, momentum: float, moment_type: torch.dtype) -> None:
        self.moment_type = moment_type
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    def move(self, parameter: Tensor, gradient: Tensor, *, group: dict[str, Any], number: int) -> None:
        steps = self.count(parameter)
        decay = min(_MOST_DECAY, 1.0 - steps**-_DECAY_POWER)
        scaled = self._scaled(parameter, gradient.reshape(group["shapes"][number]), decay=decay).reshape_as(parameter)
        kept = self.moment(parameter)
        exact = (
            kept.to(scaled.dtype, copy=True)
            .mul_(self.decay(group["momentum"]))
            .add_(scaled, alpha=1 - group["momentum"])
        )
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(exact, alpha=-group["lr"])
        kept.copy_(exact)

    def _scaled(self, parameter: Tensor, gradient: Tensor, *, decay: float) -> Tensor:
        """The gradient over the root of its second moment, after moving that."""
        state, squares = self.state[parameter], gradient.square().add_(_EPS)
        factored = _factored_dimensions(tuple(gradient.shape))
        if factored is None:
            second = state.setdefault("exp_avg_sq", torch.zeros_like(squares))
            return gradient * second.mul_(decay).add_(squares, alpha=1 - decay).rsqrt()
        smaller, larger = factored
        moved: list[Tensor] = []
        for name, dimension in (("exp_avg_sq_row", larger), ("exp_avg_sq_column", smaller)):
            mean = squares.mean(dim=dimension, keepdim=True)
            moved.append(state.setdefault(name, torch.zeros_like(mean)).mul_(decay).add_(mean, alpha=1 - decay))
        rows, columns = moved
        return gradient * (rows / rows.mean(dim=smaller, keepdim=True)).rsqrt() * columns.rsqrt()


def _factored_dimensions(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The second largest dimension and the largest; None: too small to factor."""
    if len(shape) < 2:
        return None
    *_, smaller, larger = sorted(range(len(shape)), key=lambda dimension: shape[dimension])
    return (smaller, larger) if shape[smaller] >= _LEAST_FACTORED else None

"""big_vision's variant of Adafactor: a factored second moment, momentum in bf16, no clipping of the update.

From Zhai et al., Scaling Vision Transformers (arXiv 2106.04560, section 3.4) and big_vision's `optax.py`: the decay at
step t is min(0.999, 1 - t^-0.8); the learning rate is not scaled by the parameter's size. Takes whole parameters, and
2 bytes of each instead of AdamW's 8. timm's `AdafactorBigVision` differs: it averages the momentum in bf16
itself, moves the weights by the rounded value, and factors from dimensions of 16, not 32.
"""

from typing import Any

import torch
from torch import Tensor

_DECAY_POWER = 0.8
_MOST_DECAY = 0.999
_LEAST_FACTORED = 32  # the two largest dimensions of what is factored have at least this size
_EPS = 1e-30


class BigVisionAdafactor(torch.optim.Optimizer):
    """`shapes` of a group: those in which its parameters are factored; flax gives attention's a dimension of heads."""

    def __init__(self, groups: Any, *, lr: float, momentum: float, moment_type: torch.dtype) -> None:
        self._moment_type = moment_type
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which casts all to float32: exact, but not what is kept."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["exp_avg"] = state["exp_avg"].to(self._moment_type)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Without closures."""
        for group in self.param_groups:
            keep, add = float(torch.tensor(group["momentum"], dtype=self._moment_type)), 1 - group["momentum"]
            for parameter, shape in zip(group["params"], group["shapes"], strict=True):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=self._moment_type, requires_grad=False)
                    state["step"] = torch.tensor(0.0)
                state["step"] += 1
                decay = min(_MOST_DECAY, 1.0 - int(state["step"]) ** -_DECAY_POWER)
                scaled = _scaled(parameter.grad.reshape(shape), state, decay=decay).reshape_as(parameter)
                exact = state["exp_avg"].to(scaled.dtype, copy=True).mul_(keep).add_(scaled, alpha=add)
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(exact, alpha=-group["lr"])
                state["exp_avg"].copy_(exact)


def _scaled(gradient: Tensor, state: dict[str, Tensor], *, decay: float) -> Tensor:
    """The gradient over the root of its second moment, after moving that."""
    squares = gradient.square().add_(_EPS)
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

"""big_vision's Adafactor: factored second moment, momentum in bf16, no update clipping.

From Zhai et al., Scaling Vision Transformers (arXiv 2106.04560, section 3.4) and big_vision's `optax.py`: the decay at
step t is min(0.999, 1 - t^-0.8); the learning rate is not scaled by the parameter's size. Takes whole parameters; costs
2 bytes a parameter to AdamW's 8. timm's `AdafactorBigVision` differs: it averages the momentum in bf16, applies the
rounded value, and factors dimensions from 16 up, not 32.
"""

from typing import Any

import torch
from torch import Tensor

_DECAY_POWER = 0.8
_MOST_DECAY = 0.999
_LEAST_FACTORED = 32  # minimum of the second largest dimension
_EPS = 1e-30


class BigVisionAdafactor(torch.optim.Optimizer):
    """A group's `shapes` are those its parameters are factored in; flax gives attention's a heads dimension."""

    def __init__(self, groups: Any, *, lr: float, momentum: float, moment_type: torch.dtype) -> None:
        self._moment_type = moment_type
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo torch's cast of the momentum to float32."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["exp_avg"] = state["exp_avg"].to(self._moment_type)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
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
    """Update the second moment and divide the gradient by its root."""
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
    """Return the second largest and the largest dimension; None if too small to factor."""
    if len(shape) < 2:
        return None
    *_, smaller, larger = sorted(range(len(shape)), key=lambda dimension: shape[dimension])
    return (smaller, larger) if shape[smaller] >= _LEAST_FACTORED else None

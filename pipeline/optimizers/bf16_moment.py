"""AdamW and SGD that keep their first moment in bf16 between steps, as Google's recipes do.

The moment is read, moved in float32, used, and rounded as it is put back (optax's `mu_dtype`, `accumulator_dtype`). As
in optax, its decay is rounded too: 0.9 becomes 0.8984375, so Adam's and SGD's steps are 1.5 % shorter in the long run.

Element by element, so ZeRO may cut the parameters anywhere. Saves 2 bytes of a parameter; takes about ten small kernels
for each tensor that is stepped (parameters at ZeRO 0, flattened groups at ZeRO 1 to 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

BF16_CHUNK_ELEMENTS = 1 << 24  # 64 MiB of float32: bounds what a step needs besides


def in_bf16(value: float) -> float:
    """The nearest number that bf16 has."""
    return float(torch.tensor(value, dtype=torch.bfloat16))


class MomentInItsType(torch.optim.Optimizer):
    """Keeps the moment called `rounded` in `moment_type`; torch's `load_state_dict` would cast it to float32."""

    rounded = "exp_avg"
    moment_type: torch.dtype

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            if self.rounded in state:
                state[self.rounded] = state[self.rounded].to(self.moment_type)  # they are its values: exact

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Closures are not supported."""
        if closure is not None:
            raise ValueError("closures are not supported: compute the gradients before")
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, group=group, number=number)

    def move(self, parameter: Tensor, gradient: Tensor, *, group: dict[str, Any], number: int) -> None:
        """One step of one parameter, the `number`th of its group."""
        raise NotImplementedError

    def decay(self, value: float) -> float:
        """Decay factor of the moment: `value` in the moment's type."""
        return float(torch.tensor(value, dtype=self.moment_type))

    def moment(self, parameter: Tensor) -> Tensor:
        """The rounded moment, zeros at first."""
        state = self.state[parameter]
        if self.rounded not in state:
            state[self.rounded] = torch.zeros_like(parameter, dtype=self.moment_type, requires_grad=False)
        return state[self.rounded]

    def count(self, parameter: Tensor) -> int:
        """Add one to the parameter's steps and return them; kept as torch's AdamW keeps them."""
        steps = self.state[parameter].setdefault("step", torch.tensor(0.0))
        steps += 1
        return int(steps)


class AdamWBf16(MomentInItsType):
    """AdamW (Loshchilov and Hutter; decay multiplied by the learning rate) with the first moment in bf16."""

    moment_type = torch.bfloat16

    def __init__(self, groups: Any, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def move(self, parameter: Tensor, gradient: Tensor, *, group: dict[str, Any], number: int) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        first = self.moment(parameter)
        if "exp_avg_sq" not in state:
            state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
        steps = self.count(parameter)
        rate, root = group["lr"] / (1 - beta1**steps), math.sqrt(1 - beta2**steps)
        for weight, change, kept, second in _chunks(parameter, gradient, first, state["exp_avg_sq"]):
            exact = kept.to(change.dtype).mul_(self.decay(beta1)).add_(change, alpha=1 - beta1)
            second.mul_(beta2).addcmul_(change, change, value=1 - beta2)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.addcdiv_(exact, second.sqrt().div_(root).add_(group["eps"]), value=-rate)
            kept.copy_(exact)


class SgdBf16(MomentInItsType):
    """SGD with momentum and decoupled decay, as `optim.DecoupledSgd`, with the momentum in bf16."""

    rounded = "momentum_buffer"
    moment_type = torch.bfloat16

    def __init__(self, groups: Any, *, lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    def move(self, parameter: Tensor, gradient: Tensor, *, group: dict[str, Any], number: int) -> None:
        for weight, change, kept in _chunks(parameter, gradient, self.moment(parameter)):
            exact = kept.to(change.dtype).mul_(self.decay(group["momentum"])).add_(change)
            weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(exact, alpha=-group["lr"])
            kept.copy_(exact)


def _chunks(*tensors: Tensor) -> Iterator[list[Tensor]]:
    flat = [tensor.detach().reshape(-1) if tensor is tensors[1] else tensor.detach().view(-1) for tensor in tensors]
    for first in range(0, flat[0].numel(), BF16_CHUNK_ELEMENTS):
        count = min(BF16_CHUNK_ELEMENTS, flat[0].numel() - first)
        yield [tensor.narrow(0, first, count) for tensor in flat]

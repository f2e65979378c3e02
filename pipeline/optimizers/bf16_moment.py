"""AdamW and SGD with the first moment stored in bf16, as in Google's recipes.

A step updates and applies the moment in float32, and rounds it to store it (optax's `mu_dtype`, `accumulator_dtype`).
As in optax, its decay is rounded too: 0.9 becomes 0.8984375, so in the long run steps are 1.5 % shorter. Elementwise,
so ZeRO may cut parameters anywhere. Saves 2 bytes a parameter; costs about 15 small kernels for each stepped tensor
(parameters at ZeRO 0, flattened groups at 1 to 3). Reads `grad_scale` and `found_inf`, like torch's fused optimizers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

BF16_CHUNK_ELEMENTS = 1 << 24  # 64 MiB of float32: bounds a step's temporaries


class Bf16Optimizer(torch.optim.Optimizer, ABC):
    """Steps parameters chunk by chunk with a subclass's `law`."""

    moments: ClassVar[dict[str, torch.dtype]]
    _step_supports_amp_scaling = True  # tells torch that `step` reads `grad_scale` and `found_inf`

    def __init__(self, groups: Any, **defaults: Any) -> None:
        super().__init__(groups, {"weight_decay": 0.0, "fused": True, **defaults})  # fused: keeps `step` on the device

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        skip, divisor = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        for group in self.param_groups:
            moved = [each for each in group["params"] if each.grad is not None]
            if not moved:
                continue
            states = [self._state(each) for each in moved]
            skipped = torch.zeros((), device=moved[0].device) if skip is None else skip
            applied = 1 - skipped.double()
            move = self.law(group, applied=applied, states=states)
            for parameter, state in zip(moved, states, strict=True):
                flat = [each.detach().view(-1) for each in (parameter, *(state[name] for name in self.moments))]
                pieces = [each.split(BF16_CHUNK_ELEMENTS) for each in (parameter.grad.reshape(-1), *flat)]
                for gradient, weight, *moments in zip(*pieces, strict=True):
                    clipped = gradient if divisor is None else gradient / divisor
                    move(weight, torch.where(skipped > 0, 0.0, clipped), *moments)

    @abstractmethod
    def law(self, group: dict[str, Any], *, applied: Tensor, states: list[dict[str, Tensor]]) -> Callable[..., None]:
        """Return the in-place update of weights and moments by a gradient, which changes nothing where the float64
        scalar `applied` is 0 (rather than 1) and the gradient 0."""

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        for name, dtype in self.moments.items():
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            elif state[name].dtype != dtype:  # torch's `load_state_dict` casts to float32
                state[name] = state[name].to(dtype)
        return state


class AdamWBf16(Bf16Optimizer):
    """AdamW (Loshchilov and Hutter; decay times learning rate) with the first moment in bf16."""

    moments: ClassVar = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32}

    def law(self, group: dict[str, Any], *, applied: Tensor, states: list[dict[str, Tensor]]) -> Callable[..., None]:
        for state in states:
            if "step" not in state:
                state["step"] = torch.zeros((), device=applied.device)
        torch._foreach_add_([state["step"] for state in states], applied.float())
        (beta1, beta2), lr, steps = group["betas"], group["lr"], states[0]["step"]
        count = steps.double().clamp_(min=1)  # 0 if the very first step is skipped
        keep1, keep2 = 1 - applied * (1 - in_bf16(beta1)), 1 - applied * (1 - beta2)
        rate, root = applied * lr / (1 - beta1**count), (1 - beta2**count).sqrt()
        shrink = 1 - applied * lr * group["weight_decay"]
        keep1, keep2, rate, root, shrink = torch.stack([keep1, keep2, rate, root, shrink]).float().unbind()

        def move(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> None:
            exact = first.float().mul_(keep1).add_(gradient, alpha=1 - beta1)
            second.mul_(keep2).addcmul_(gradient, gradient, value=1 - beta2)
            weight.mul_(shrink).sub_(exact.div(second.sqrt().div_(root).add_(group["eps"])).mul_(rate))
            first.copy_(exact)

        return move


class SgdBf16(Bf16Optimizer):
    """`optim.DecoupledSgd` with the momentum in bf16."""

    moments: ClassVar = {"momentum_buffer": torch.bfloat16}

    def law(self, group: dict[str, Any], *, applied: Tensor, states: list[dict[str, Tensor]]) -> Callable[..., None]:
        applied = applied.float()
        keep = 1 - applied * (1 - in_bf16(group["momentum"]))
        rate, shrink = applied * group["lr"], 1 - applied * (group["lr"] * group["weight_decay"])

        def move(weight: Tensor, gradient: Tensor, momentum: Tensor) -> None:
            exact = momentum.float().mul_(keep).add_(gradient)
            weight.mul_(shrink).sub_(exact * rate)
            momentum.copy_(exact)

        return move


def in_bf16(value: float) -> float:
    """Round to the nearest bf16 number."""
    return float(torch.tensor(value, dtype=torch.bfloat16))

"""The optimizer of a stage: torch's AdamW, or SGD with AdamW's weight decay, over two parameter groups.

Weight decay affects only the kernels of linear and convolution layers (big_vision: names ending in `kernel`). The
engine clips gradients. To add an optimizer: an entry in `pipeline.vocabulary` and a case in `build_optimizer`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from pipeline.recipe.optimizer import OptimizerConfig


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, object]]:
    """Two groups, kernels with `weight_decay` and the rest without; empty groups are left out."""
    kernels = [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and module.weight.requires_grad
    ]
    decayed = {id(parameter) for parameter in kernels}
    others = [p for p in model.parameters() if id(p) not in decayed and p.requires_grad]
    groups: list[dict[str, object]] = [
        {"params": kernels, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class DecoupledSgd(torch.optim.SGD):
    """SGD with momentum and AdamW's weight decay, p <- p - lr * wd * p: torch's adds wd * p to the gradient, so that a
    momentum of 0.9 makes it ten times as much. The paper fine-tunes without weight decay."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Closures are not supported."""
        if closure is not None:
            raise ValueError("closures are not supported: compute the gradients before")
        decays = [float(group["weight_decay"]) for group in self.param_groups]
        try:
            for group, decay in zip(self.param_groups, decays, strict=True):
                for parameter in group["params"] if decay else ():
                    if parameter.grad is not None:
                        parameter.mul_(1 - group["lr"] * decay)
                group["weight_decay"] = 0.0  # torch's part is the momentum alone
            return super().step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (fused on a GPU) or SGD with momentum; the learning rate is set before every step."""
    groups = parameter_groups(model, weight_decay=config.weight_decay)
    match config.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=torch.cuda.is_available())
        case "sgd":
            return DecoupledSgd(groups, lr=config.lr, momentum=config.momentum)

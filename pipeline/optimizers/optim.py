"""Build a stage's optimizer from its name in the recipe.

The engine clips gradients, and before a step sets each group's learning rate: the schedule's times the group's
`lr_scale`. To add an optimizer: an entry in `pipeline.recipe.vocabulary` and a case in `optimizer_over`.
"""

from typing import Any

import torch
from torch import nn

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.optimizers.adafactor import BigVisionAdafactor
from shardvit.pipeline.optimizers.bf16_moment import AdamWBf16, SgdBf16
from shardvit.pipeline.optimizers.parameter_groups import parameter_groups
from shardvit.pipeline.own_code.by_path import load_own, shown
from shardvit.pipeline.recipe.optimizer import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimizer over `model`'s parameter groups."""
    return optimizer_over(parameter_groups(model, config), config)


def optimizer_over(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimizer over groups from `parameter_groups`."""
    lr, betas, momentum, bf16 = config.lr, config.betas, config.momentum, config.first_moment == "bf16"
    match config.name:
        case "adamw" if bf16:
            return AdamWBf16(groups, lr=lr, betas=betas, eps=config.eps)
        case "adamw":
            return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=config.eps, fused=True)
        case "sgd" if bf16:
            return SgdBf16(groups, lr=lr, momentum=momentum)
        case "sgd":
            return DecoupledSgd(groups, lr=lr, momentum=momentum)
        case "adafactor":
            moment_type = torch.bfloat16 if bf16 else torch.float32
            return BigVisionAdafactor(groups, lr=lr, momentum=momentum, moment_type=moment_type)
        case "lamb":
            from timm.optim import Lamb

            return Lamb(groups, lr=lr, betas=betas, eps=config.eps, weight_decay=0.0, max_grad_norm=None)
        case "custom":
            return _own_optimizer(groups, config)
        case "muon":
            from timm.optim import Muon

            return Muon(
                groups,
                lr=lr,
                momentum=momentum,
                betas=betas,
                ns_coefficients="original",
                adjust_lr_fn="match_rms_adamw",  # one learning rate and decay for both halves (arXiv 2502.16982)
            )


def _own_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    given = [id(each) for group in groups for _, each in group["params"]]  # torch takes the names out
    made = load_own(config.custom or "")(groups, config.lr)
    theirs = made.param_groups if isinstance(made, torch.optim.Optimizer) else []
    if sorted(id(each) for group in theirs for each in group["params"]) != sorted(given) or not all(
        "lr_scale" in group and "param_names" in group for group in theirs
    ):
        raise UserError(
            f"optimizer.custom {shown(config.custom)}: it must return a torch.optim.Optimizer over the groups that it "
            "is given"
        )
    return made


class DecoupledSgd(torch.optim.SGD):
    """SGD with momentum and decoupled weight decay, p <- p - lr * wd * p. torch adds wd * p to the gradient, which a
    momentum of 0.9 multiplies by ten. Reads `grad_scale` and `found_inf` like torch's fused optimizers."""

    def __init__(self, groups: Any, *, lr: float, momentum: float) -> None:
        super().__init__(groups, lr=lr, momentum=momentum, fused=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        skipped = getattr(self, "found_inf", None)
        decays = [float(group["weight_decay"]) for group in self.param_groups]
        try:
            for group, decay in zip(self.param_groups, decays, strict=True):
                moved = [parameter for parameter in group["params"] if parameter.grad is not None]
                for parameter in moved:
                    if group["momentum"] and "momentum_buffer" not in self.state[parameter]:
                        # torch would leave it uninitialised if its first step is skipped.
                        self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
                if decay and moved:
                    lost = group["lr"] * decay
                    torch._foreach_mul_(moved, 1 - lost if skipped is None else 1 - lost * (1 - skipped))
                group["weight_decay"] = 0.0  # leaves torch only the momentum
            super().step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay

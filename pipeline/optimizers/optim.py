"""Build a stage's optimizer from its name in the recipe.

The engine clips gradients, and before a step sets each group's learning rate: the schedule's times the group's
`lr_scale`. To add an optimizer: an entry in `pipeline.recipe.vocabulary` and a case in `optimizer_over`.
"""

from typing import Any, Literal

import torch
from torch import nn

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.optimizers.adafactor import BigVisionAdafactor
from shardvit.pipeline.optimizers.adam import Lamb, PieceAdamW
from shardvit.pipeline.optimizers.muon import Muon
from shardvit.pipeline.optimizers.parameter_groups import parameter_groups
from shardvit.pipeline.optimizers.sgd import Sgd
from shardvit.pipeline.optimizers.split import SplitLamb, SplitMuon, SplitTensors
from shardvit.pipeline.own_code.by_path import load_own, shown
from shardvit.pipeline.recipe.optimizer import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimizer over `model`'s parameter groups."""
    return optimizer_over(parameter_groups(model, config), config)


def optimizer_over(
    groups: list[dict[str, Any]],
    config: OptimizerConfig,
    *,
    rates: Literal["few", "many"] = "few",
    split: SplitTensors | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer over groups from `parameter_groups`; `many` rates: operations do not grow with the groups.
    `split`: those of which the groups have pieces, for LAMB and Muon."""
    lr, betas, eps, momentum = config.lr, config.betas, config.eps, config.momentum
    moment_type = torch.bfloat16 if config.first_moment == "bf16" else torch.float32
    match config.name:
        case "adamw" if moment_type != torch.float32 or rates == "many":
            return PieceAdamW(groups, lr=lr, betas=betas, eps=eps, moment_type=moment_type)
        case "adamw":
            return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
        case "sgd":
            return Sgd(groups, lr=lr, momentum=momentum, moment_type=moment_type)
        case "adafactor":
            return BigVisionAdafactor(groups, lr=lr, momentum=momentum, moment_type=moment_type)
        case "lamb" if split:
            return SplitLamb(groups, split=split, lr=lr, betas=betas, eps=eps)
        case "muon" if split:
            return SplitMuon(groups, split=split, lr=lr, momentum=momentum, betas=betas, eps=eps)
        case "lamb":
            return Lamb(groups, lr=lr, betas=betas, eps=eps)
        case "muon":
            return Muon(groups, lr=lr, momentum=momentum, betas=betas, eps=eps)
        case "custom":
            return _own_optimizer(groups, config)


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

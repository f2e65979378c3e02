"""The optimizer of a stage: torch's own AdamW or SGD over two parameter groups.

Weight decay touches the kernels of linear and convolution layers only (big_vision: names that end in `kernel`); biases,
LayerNorms, the class token and the position embeddings are left alone. Gradient clipping is the engine's.
"""

from __future__ import annotations

import torch
from torch import nn

from pipeline.recipe import OptimizerConfig


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: the kernels with `weight_decay`, everything else with none; empty groups are left out."""
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


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (fused on a GPU) or SGD with momentum; the learning rate is set anew before every step."""
    groups = parameter_groups(model, weight_decay=config.weight_decay)
    match config.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=torch.cuda.is_available())
        case "sgd":
            # torch couples SGD's decay with the gradient, which is the decoupled form up to the momentum; the
            # paper fine-tunes without any.
            return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)

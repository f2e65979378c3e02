"""Recipe -> engine: which backend carries the arithmetic out. The libraries are imported here, when one is chosen."""

from __future__ import annotations

import torch
from torch import nn

from data_shards.errors import UserError
from pipeline.engine import Engine
from pipeline.plan import StagePlan
from pipeline.ranks import Ranks
from pipeline.recipe import Recipe, StageName


def open_engine(recipe: Recipe, *, stage: StageName, plan: StagePlan, model: nn.Module, ranks: Ranks) -> Engine:
    """Build the backend that the recipe names; the process group is joined already.

    Raises:
        UserError: a precision that this device cannot do.
    """
    if recipe.engine.precision == "fp16" and not torch.cuda.is_available():
        raise UserError("engine.precision fp16 needs a GPU: use bf16 or fp32 on this machine")
    optimizer = recipe.train_stage(stage).optimizer
    match recipe.engine.backend:
        case "deepspeed":
            from pipeline.engine_deepspeed import DeepSpeedEngine

            return DeepSpeedEngine(model, config=recipe.engine, optimizer=optimizer, plan=plan, ranks=ranks)
        case "accelerate":
            from pipeline.engine_accelerate import AccelerateEngine

            return AccelerateEngine(model, config=recipe.engine, optimizer=optimizer, plan=plan, ranks=ranks)

"""Open the engine a recipe names, importing only that backend's library."""

import torch
from torch import nn

from shardvit.data_shards.errors import UserError
from shardvit.model.without_compiler import keep_out_of_optimizers
from shardvit.pipeline.engine.base import Engine
from shardvit.pipeline.engine.saved_state.frozen import freeze
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stage_plan import StagePlan
from shardvit.pipeline.recipe.vocabulary import StageName


def open_engine(recipe: Recipe, *, stage: StageName, plan: StagePlan, model: nn.Module, ranks: Ranks) -> Engine:
    """UserError if the device lacks the precision, or the model lacks a part to freeze."""
    if recipe.engine.precision == "fp16" and not torch.cuda.is_available():
        raise UserError("engine.precision fp16 needs a GPU: use bf16 or fp32 on this machine")
    config = recipe.train_stage(stage)
    freeze(model, config.optimizer.frozen, key=f"stages.{stage}.optimizer.frozen")
    keep_out_of_optimizers()
    match recipe.engine.backend:
        case "deepspeed" if recipe.engine.zero_stage == 0:
            from shardvit.pipeline.engine.replicated import DdpEngine as Backend
        case "deepspeed":
            from shardvit.pipeline.engine.deepspeed_engine import DeepSpeedEngine as Backend
        case "accelerate":
            from shardvit.pipeline.engine.replicated import AccelerateEngine as Backend
    return Backend(model, config=recipe.engine, stage=config, plan=plan, ranks=ranks)

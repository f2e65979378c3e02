"""Plain data parallelism by accelerate (DDP), for debugging and comparison.

Half precision is autocast over float32 weights; every process keeps all weights and optimizer state (`replicated`).
accelerate's DeepSpeed plugin is not used: on a CPU it silently falls back to DDP, and it hides the checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeline.engine.replicated import ReplicatedEngine
from pipeline.engine.saved_state.portable import ACCELERATE_FILE
from pipeline.ranks.group import Ranks
from pipeline.recipe.schema import EngineConfig
from pipeline.recipe.stage import TrainStage
from pipeline.recipe.stage_plan import StagePlan

_MIXED_PRECISION = {"bf16": "bf16", "fp16": "fp16", "fp32": "no"}


class AccelerateEngine(ReplicatedEngine):
    """See `pipeline.engine.base.Engine`."""

    file, backend = ACCELERATE_FILE, "accelerate"

    def __init__(
        self, model: nn.Module, *, config: EngineConfig, stage: TrainStage, plan: StagePlan, ranks: Ranks
    ) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs

        accelerator: Any = Accelerator(
            cpu=not torch.cuda.is_available(),
            mixed_precision=_MIXED_PRECISION[config.precision],
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        )
        if accelerator.num_processes != ranks.place.world_size:
            raise RuntimeError(f"accelerate sees {accelerator.num_processes} of {ranks.place.world_size} processes")
        super().__init__(
            model,
            wrap=accelerator.prepare,
            computes_in=torch.float32,
            scaler=accelerator.scaler,
            stage=stage,
            plan=plan,
            ranks=ranks,
        )

"""Plain data parallelism by accelerate (DDP), for debugging and comparison.

Half precision is autocast over float32 weights; every process keeps all weights and optimizer state (`replicated`).
accelerate's DeepSpeed plugin is not used: on a CPU it silently falls back to DDP, and it hides the checkpoint.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from pipeline.engine.ddp_engine import InOrder, settle_buckets
from pipeline.engine.replicated import ReplicatedEngine, ReplicatedState
from pipeline.engine.saved_state.portable import ACCELERATE_FILE
from pipeline.ranks.group import Ranks
from pipeline.recipe.schema import EngineConfig
from pipeline.recipe.stage import TrainStage
from pipeline.recipe.stage_plan import StagePlan

_MIXED_PRECISION = {"bf16": "bf16", "fp16": "fp16", "fp32": "no"}


class AccelerateEngine(ReplicatedEngine):
    """See `pipeline.engine.protocol.Engine`."""

    file, backend = ACCELERATE_FILE, "accelerate"
    input_dtype = torch.float32

    def __init__(
        self, model: nn.Module, *, config: EngineConfig, stage: TrainStage, plan: StagePlan, ranks: Ranks
    ) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs

        self._accelerator: Any = Accelerator(
            cpu=not torch.cuda.is_available(),
            mixed_precision=_MIXED_PRECISION[config.precision],
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        )
        if self._accelerator.num_processes != ranks.place.world_size:
            raise RuntimeError(
                f"accelerate sees {self._accelerator.num_processes} of {ranks.place.world_size} processes"
            )
        self._model = self._accelerator.prepare(InOrder(model))
        state = ReplicatedState(
            model, computes_in=torch.float32, optimizer=stage.optimizer, ema=stage.ema, scaler=self._accelerator.scaler
        )
        device = torch.device(self._accelerator.device)
        super().__init__(model, state=state, device=device, plan=plan, ranks=ranks)
        if ranks.place.world_size > 1:
            settle_buckets(self._model)
        self._clear_gradients()

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """DDP decides here whether the backward pass will reduce over the ranks."""
        self._micro_step += 1
        last = self._micro_step == self._accumulation_steps
        with contextlib.nullcontext() if last else self._accelerator.no_sync(self._model):
            return self._model(*inputs)

    @torch.no_grad()
    def predict(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self._model(*inputs)

    def backward(self, loss: torch.Tensor) -> None:
        self._accelerator.backward(loss / self._accumulation_steps)

    def _clear_gradients(self) -> None:
        self._state.clear_gradients(keep_memory=False)

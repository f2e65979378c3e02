"""Plain data parallelism by accelerate (DDP) behind the `Engine` protocol, for debugging and comparison.

Nothing is sharded: every process keeps all weights and optimizer state, and rank 0 writes them to checkpoints. Half
precision is autocast over float32 weights. accelerate's DeepSpeed plugin is not used: on a CPU it silently falls back
to DDP, and it hides the checkpoint.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.engine.average import WeightAverage, average_file
from pipeline.engine.masters import Slot, put_average
from pipeline.engine.portable import open_accelerate
from pipeline.engine.protocol import StepResult, exchange_requests
from pipeline.engine.reading import read_state
from pipeline.engine.state_files import StateFile, state_file
from pipeline.optimizers.optim import build_optimizer, set_lr
from pipeline.ranks.group import Ranks
from pipeline.ranks.stopping import StopOrSave
from pipeline.recipe.optimizer import OptimizerConfig
from pipeline.recipe.schema import EngineConfig
from pipeline.recipe.stage import EmaConfig
from pipeline.recipe.stage_plan import StagePlan

FILE = "accelerate.pt"
_MIXED_PRECISION = {"bf16": "bf16", "fp16": "fp16", "fp32": "no"}


class AccelerateEngine:
    """See `pipeline.engine.protocol.Engine`."""

    input_dtype = torch.float32

    def __init__(
        self,
        model: nn.Module,
        *,
        config: EngineConfig,
        optimizer: OptimizerConfig,
        ema: EmaConfig | None,
        plan: StagePlan,
        ranks: Ranks,
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
        self.device = torch.device(self._accelerator.device)
        self._ranks = ranks
        self._accumulation_steps = plan.accumulation_steps
        self._micro_step = 0
        self._clip_grad_norm = optimizer.clip_grad_norm
        self._optimizer: Any
        self._model, self._optimizer = self._accelerator.prepare(model, build_optimizer(model, optimizer))
        trained = {name: each for name, each in self.module.named_parameters() if each.requires_grad}
        self._average = WeightAverage(trained, config=ema) if ema else None

    @property
    def module(self) -> nn.Module:
        return self._accelerator.unwrap_model(self._model)

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

    def step(self, *, lr: float, requests: StopOrSave) -> StepResult:
        assert self._micro_step == self._accumulation_steps, "step() before all micro-batches"
        self._micro_step = 0
        set_lr(self._optimizer.param_groups, lr)
        limit = self._clip_grad_norm or math.inf
        grad_norm = float(self._accelerator.clip_grad_norm_(self._model.parameters(), limit))
        if not math.isfinite(grad_norm):
            for parameter in self._model.parameters():
                parameter.grad = None
        self._optimizer.step()
        self._optimizer.zero_grad()
        applied = math.isfinite(grad_norm)
        if applied and self._average:
            self._average.update()
        return StepResult.known(
            grad_norm=grad_norm, applied=applied, requests=exchange_requests(requests, device=self.device)
        )

    def pass_over(self, *, requests: StopOrSave) -> StepResult:
        return StepResult.passed_over(exchange_requests(requests, device=self.device))

    def snapshot(self) -> tuple[StateFile, ...]:
        if not self._ranks.place.is_main:
            return ()
        scaler = self._accelerator.scaler
        state = {
            "model": self.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
        }
        average = (state_file(average_file(0), self._average.state()),) if self._average else ()
        return (state_file(FILE, state), *average)

    def load(self, folder: Path, *, written: dict[str, Any]) -> None:
        saved = open_accelerate(folder / FILE, model=self.module)
        state = read_state(folder / FILE, how="copy")
        self.module.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        if self._accelerator.scaler is not None:
            self._accelerator.scaler.load_state_dict(state["scaler"])
        if self._average:
            places = {name: Slot(each, 0, 0, each.numel()) for name, each in self.module.named_parameters()}
            put_average(self._average, saved, places=places)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        assert self._average, "the recipe's stage has no ema"
        self._average.exchange()
        try:
            yield
        finally:
            self._average.exchange()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in self.module.state_dict().items()}

"""What carries the training loop out: one protocol, two backends.

`deepspeed` (`deepspeed_engine`, the default on every device) shards and checkpoints; `accelerate` (`accelerate_engine`)
is plain data parallelism, for debugging and comparison. Nothing else in the project imports either library; `open`
chooses. The loop calls, per optimizer step: `forward` and `backward` for each micro-batch, then `step`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from pipeline.engine.state_files import StateFile


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did."""

    applied: bool  # False: the gradient was not finite, nothing moved
    grad_norm: float  # global norm before clipping; not finite when not applied


class Engine(Protocol):
    """What the loop, evaluation and checkpoints need of a backend."""

    @property
    def input_dtype(self) -> torch.dtype:
        """What images are to be cast to."""
        ...

    @property
    def device(self) -> torch.device:
        """Where images and labels belong."""
        ...

    @property
    def module(self) -> nn.Module:
        """The model; its forward pass may be a collective operation (ZeRO-3)."""
        ...

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The model's outputs for one micro-batch: of images [n, 3, size, size], logits [n, classes]."""
        ...

    def predict(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Outputs without gradients, in evaluation mode; to be called equally often on all ranks (ZeRO-3 gathers)."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a micro-batch's mean loss, divided by the accumulation steps."""
        ...

    def step(self, *, lr: float) -> StepResult:
        """Average over the ranks, clip, and move the weights, unless the gradient is not finite."""
        ...

    def snapshot(self) -> tuple[StateFile, ...]:
        """This rank's part of the state, as files to be written; they share the engine's memory; collective."""
        ...

    def load(self, folder: Path, *, written: dict[str, Any]) -> None:
        """Restore what `snapshot` gave and was written into `folder`, by any number of ranks and any ZeRO stage.

        Collective. Weights, moments and counters are the written ones to the last bit. `written` is the checkpoint's
        identity (`pipeline.checkpoint.identity.checkpoint_identity`); its `processes` and `zero_stage` say how to read
        it, its backend and precision are this engine's.

        Raises:
            UserError: the checkpoint is of another model.
        """
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights in float32 on the CPU, from the master copy; a collective; complete on rank 0."""
        ...

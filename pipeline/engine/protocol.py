"""The `Engine` protocol that the training loop runs on, with two backends; `open` chooses one.

`deepspeed` (the default on every device) shards and checkpoints; `accelerate` is plain data parallelism, for debugging
and comparison. Per optimizer step the loop calls `forward` and `backward` for each micro-batch, then `step`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from pipeline.engine.state_files import StateFile


@dataclass(frozen=True)
class StepResult:
    """The outcome of an optimizer step."""

    applied: bool  # False: the gradient was not finite, nothing moved
    grad_norm: float  # global norm before clipping; not finite when not applied


class Engine(Protocol):
    """What the loop, evaluation and checkpoints need of a backend."""

    @property
    def input_dtype(self) -> torch.dtype:
        """What images must be cast to."""
        ...

    @property
    def device(self) -> torch.device:
        """Where images and labels belong."""
        ...

    @property
    def module(self) -> nn.Module:
        """The model; its forward pass may be collective (ZeRO-3)."""
        ...

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The outputs for a task's inputs, such as images [n, 3, size, size] -> logits [n, classes]."""
        ...

    def predict(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Outputs in evaluation mode, without gradients; call equally often on all ranks (ZeRO-3 gathers)."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a micro-batch's mean loss, divided by the accumulation steps."""
        ...

    def step(self, *, lr: float) -> StepResult:
        """Average over the ranks, clip, and move the weights, unless the gradient is not finite."""
        ...

    def snapshot(self) -> tuple[StateFile, ...]:
        """This rank's files of the state, sharing the engine's memory; collective."""
        ...

    def load(self, folder: Path, *, written: dict[str, Any]) -> None:
        """Restore, to the last bit, a checkpoint of any world size and ZeRO stage; collective.

        `written` is its identity (`checkpoint.identity.checkpoint_identity`): `processes` and `zero_stage` say how to
        read it; backend and precision are this engine's. UserError: it is of another model.
        """
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """Within it, the weights are their moving average, for `predict` and `weights`; do not train or save there.
        Then everything is as before to the last bit, also after an exception. Not collective."""
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights in float32 on the CPU, from the master copy; collective; complete on rank 0."""
        ...

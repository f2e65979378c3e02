"""The `Engine` protocol that the training loop runs on, with two backends; `open` chooses one.

`deepspeed` (the default on every device) shards and checkpoints, but for ZeRO 0, which is torch's DDP; `accelerate` is
plain data parallelism, for debugging and comparison. Per optimizer step the loop calls `forward` and `backward` for
each micro-batch, then `step`.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed, nn

from pipeline.engine.saved_state.host_copy import Hold
from pipeline.engine.saved_state.state_files import StateFile
from pipeline.engine.weight_norms import Measure

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}  # of `engine.precision`
Flags = tuple[bool, ...]  # one rank's, or of any rank; the engine reduces them and need not know what they mean


@dataclass(frozen=True)
class StepResult:
    """The outcome of an optimizer step, the same on all ranks.

    Attributes:
        numbers: float32 [2 + flags], still on the engine's device: the global gradient norm before clipping (not finite
            when the step was not applied); 1 if it was applied, 0 if the gradient was not finite and nothing moved;
            for each flag, not 0 if any rank raised it. Reading them waits for the device, so the loop does that a step
            later (`late_metrics`).
    """

    numbers: torch.Tensor

    @property
    def applied(self) -> torch.Tensor:
        """1 or 0, 0-dimensional."""
        return self.numbers[1]

    @classmethod
    def known(cls, *, grad_norm: float, applied: bool, flags: torch.Tensor) -> StepResult:
        """The result of a step that the host knows already; `flags`: from `reduce_flags`."""
        known = torch.tensor([grad_norm, applied], dtype=torch.float32, device=flags.device)
        return cls(torch.cat([known, flags]))

    @classmethod
    def passed_over(cls, flags: torch.Tensor) -> StepResult:
        """The result of a skipped step."""
        return cls.known(grad_norm=math.nan, applied=False, flags=flags)


def reduce_flags(flags: Flags, *, device: torch.device) -> torch.Tensor:
    """Float32 [flags] on `device`: 1 for each flag that any rank raised; collective. For steps whose gradient norm is
    sent in no message of ours that the flags could travel in."""
    raised = torch.zeros(len(flags), device=device)
    for number, flag in enumerate(flags):
        if flag:
            raised[number].fill_(1.0)  # a copy from the host would wait for the device
    distributed.all_reduce(raised, op=distributed.ReduceOp.MAX)
    return raised


class Engine(Protocol):
    """The backend as the loop, evaluation and checkpoints see it."""

    @property
    def input_dtype(self) -> torch.dtype:
        """Type that images are cast to."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of images and labels."""
        ...

    @property
    def hold(self) -> Hold:
        """Released before anything changes that `snapshot` gave: in `step`, `load` and `averaged`."""
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

    def step(self, *, lr: float, flags: Flags, measure: Measure = "nothing") -> StepResult:
        """Average over the ranks, clip, and move the weights, unless the gradient is not finite; reduce `flags` over
        the ranks; collective. `measure`: what `measured` will be asked about this step, the same on all ranks."""
        ...

    def measured(self) -> dict[str, float]:
        """The last step's `opt/` metrics where they are known; waits for the device; collective."""
        ...

    def pass_over(self, *, flags: Flags) -> StepResult:
        """Skip this step after a rollback: only reduce `flags`; collective. The norm is nan."""
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
        """Swap the weights with their moving average, for `predict` and `weights`; do not train or save meanwhile.
        Afterwards all is as before to the last bit, also after an exception. Not collective."""
        ...

    def close(self) -> None:
        """Let go of all memory: the process goes on with another stage. Nothing of the engine is used after that."""
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights in float32 on the CPU, from the master copy; collective; complete on rank 0."""
        ...

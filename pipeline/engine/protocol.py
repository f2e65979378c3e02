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

from pipeline.engine.host_copy import Hold
from pipeline.engine.state_files import StateFile
from pipeline.engine.weight_norms import Measure
from pipeline.ranks.stopping import StopOrSave


@dataclass(frozen=True)
class StepResult:
    """The outcome of an optimizer step, the same on all ranks.

    Attributes:
        numbers: float32 [4], still on the engine's device: the global gradient norm before clipping (not finite when
            the step was not applied); 1 if it was applied, 0 if the gradient was not finite and nothing moved; how many
            ranks request a stop; how many request a checkpoint, or 1 if any does. Reading them waits for the device, so
            the loop does that a step later (`late_metrics`).
    """

    numbers: torch.Tensor

    @property
    def applied(self) -> torch.Tensor:
        """1 or 0, 0-dimensional."""
        return self.numbers[1]

    @classmethod
    def known(cls, *, grad_norm: float, applied: bool, requests: torch.Tensor) -> StepResult:
        """Of a step that is known to the host already; `requests`: what `exchange_requests` returned."""
        known = torch.tensor([grad_norm, applied], dtype=torch.float32, device=requests.device)
        return cls(torch.cat([known, requests]))

    @classmethod
    def passed_over(cls, requests: torch.Tensor) -> StepResult:
        """Of a step that was not done."""
        return cls.known(grad_norm=math.nan, applied=False, requests=requests)


def exchange_requests(requests: StopOrSave, *, device: torch.device) -> torch.Tensor:
    """Float32 [2] on `device`, where the default process group reduces: for stop and save, 1 if any rank requests it.
    Collective; for steps whose gradient norm takes no message of ours that the requests could travel in."""
    flags = torch.zeros(2, device=device)
    for number, requested in enumerate(requests):
        if requested:
            flags[number].fill_(1.0)  # without a copy from the host, which would wait for the device
    distributed.all_reduce(flags, op=distributed.ReduceOp.MAX)
    return flags


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

    def step(self, *, lr: float, requests: StopOrSave, measure: Measure = "nothing") -> StepResult:
        """Average over the ranks, clip, and move the weights, unless the gradient is not finite; exchange what this
        rank requests; collective. `measure`: what of this step `measured` is asked for, the same on all ranks."""
        ...

    def measured(self) -> dict[str, float]:
        """What a point of the curve says of the last step and its weights, by metric (`opt/parameter_norm`,
        `opt/update_ratio`, `opt/loss_scale`), where it is known; waits for the device; collective."""
        ...

    def pass_over(self, *, requests: StopOrSave) -> StepResult:
        """In place of a step that the run does without: only exchange what this rank requests; collective. The norm is
        nan."""
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

    def close(self) -> None:
        """Let go of all memory: the process goes on with another stage. Nothing of the engine is used after that."""
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights in float32 on the CPU, from the master copy; collective; complete on rank 0."""
        ...

"""Bring each step's numbers to the host one step later, so that no step waits for its own.

A GPU copies them to pinned memory and records an event; they are read once the next step is queued. Meanwhile the host
sleeps: spinning would take a core from the data workers, and the GPU has a step to do. All ranks hand out the same
steps at the same point, however fast their device is.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardvit.pipeline.engine.base import Flags

_SLOTS = 4  # two are in use


@dataclass(frozen=True)
class StepOutcome:
    """`Engine.step`'s numbers on the host."""

    step: int  # from 1
    grad_norm: float
    applied: bool
    flags: Flags  # raised by any rank


class LateMetrics:
    """Ring buffer of step numbers in transit to the host. `grad_norm` is the last outcome's; nan: none or skipped."""

    def __init__(self, *, device: torch.device) -> None:
        self.grad_norm = math.nan
        on_gpu = device.type == "cuda"
        self._slots: list[torch.Tensor] = []  # allocated at the first `put`
        self._events = [torch.cuda.Event(blocking=True) for _ in range(_SLOTS)] if on_gpu else None
        self._pending: deque[int] = deque()

    def put(self, step: int, numbers: torch.Tensor) -> None:
        """Start copying the numbers of `step`; steps must increase."""
        assert len(self._pending) < _SLOTS, "put() without ready() or drain()"
        if not self._slots:
            pinned = self._events is not None
            self._slots = [torch.zeros(len(numbers), pin_memory=pinned) for _ in range(_SLOTS)]
        slot = step % _SLOTS
        self._slots[slot].copy_(numbers, non_blocking=True)
        if self._events is not None:
            self._events[slot].record()
        self._pending.append(step)

    def ready(self) -> Sequence[StepOutcome]:
        """Hand out each outcome once, up to the step before the last one put."""
        return [self._outcome() for _ in range(len(self._pending) - 1)]

    def drain(self) -> Sequence[StepOutcome]:
        """Hand out all outcomes left; waits for the device to finish the last step."""
        return [self._outcome() for _ in range(len(self._pending))]

    @property
    def pending(self) -> int:
        return len(self._pending)

    def _outcome(self) -> StepOutcome:
        step = self._pending.popleft()
        slot = step % _SLOTS
        if self._events is not None:
            self._events[slot].synchronize()
        self.grad_norm, applied, *flags = self._slots[slot].tolist()
        return StepOutcome(step, self.grad_norm, applied=bool(applied), flags=tuple(map(bool, flags)))

"""The learning rate at a step: warm-up times decay, as in google-research/vision_transformer (`utils.py`).

The decay runs from the end of the warm-up to the end of training. The warm-up starts from zero, so the first step of
such a run moves nothing, as in Google's code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Decay = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule in optimizer steps."""

    peak_lr: float = 0.0
    total_steps: int = 1
    warmup_steps: int = 0
    decay: Decay = "constant"
    end_lr: float = 0.0  # where a linear decay ends (Google: 1e-5); a cosine ends here too

    def __call__(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0."""
        decaying_steps = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, max(0.0, (step - self.warmup_steps) / decaying_steps))
        match self.decay:
            case "cosine":
                share = 0.5 * (1.0 + math.cos(math.pi * progress))
            case "linear":
                share = 1.0 - progress
            case "constant":
                share = 1.0
        decayed = self.end_lr + (self.peak_lr - self.end_lr) * share
        warmup = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        return decayed * warmup

"""The learning rate at a step: warm-up times decay, as in google-research's vision_transformer and big_vision.

The decay runs from the end of the warm-up to the end of training. The warm-up starts from zero, so the first step of
such a run moves nothing, as in Google's code. Progress p is the share of the steps after warm-up that are done:

    cosine    end + (peak - end) (1 + cos(pi p)) / 2
    linear    end + (peak - end) (1 - p)
    rsqrt     peak / sqrt(1 + steps since warm-up / timescale)  (Zhai et al., Scaling Vision Transformers)
    wsd       peak: warm-up, stable, decay (Hu et al., MiniCPM)
    constant  peak

rsqrt and wsd end in a cool-down: over its last steps the rate falls linearly to `end_lr`, which would be reached at the
step after the last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Decay = Literal["cosine", "linear", "rsqrt", "wsd", "constant"]


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule in optimizer steps."""

    peak_lr: float = 0.0
    total_steps: int = 1
    warmup_steps: int = 0
    decay: Decay = "constant"
    end_lr: float = 0.0  # where a linear decay ends (Google: 1e-5); a cosine and a cool-down end here too
    timescale_steps: int = 10_000  # of rsqrt
    cooldown_steps: int = 0  # of rsqrt and wsd

    def __call__(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0."""
        decaying_steps = max(1, self.total_steps - self.warmup_steps)
        decayed_steps = max(0, step - self.warmup_steps)
        progress = min(1.0, decayed_steps / decaying_steps)
        match self.decay:
            case "cosine":
                decayed = self.end_lr + (self.peak_lr - self.end_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
            case "linear":
                decayed = self.end_lr + (self.peak_lr - self.end_lr) * (1.0 - progress)
            case "rsqrt":
                decayed = self.peak_lr / math.sqrt(1.0 + decayed_steps / self.timescale_steps)
            case "wsd" | "constant":
                decayed = self.peak_lr
        if self.cooldown_steps:
            left = min(1.0, max(0.0, (self.total_steps - step) / self.cooldown_steps))
            decayed = self.end_lr + (decayed - self.end_lr) * left
        warmup = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        return decayed * warmup

"""Images/s of one GPU, from a share of its peak (MFU) or a measurement.

MFU is the FLOPs that the model needs, without recomputation, over the GPU's peak. The default shares are anchors, not
promises: what a well-tuned run of such a model reaches on a Hopper GPU in bf16. Small models and small batches are
bound by the processor that launches the kernels: `host_seconds`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from model.config import ModelConfig
from pipeline.budget.communication import ZeroKind

# Targets for one H200 in bf16, not limited by data. S/16: between a TPU v3-8 (90 epochs of ImageNet in 6 to 7 hours)
# and measurements of small ViTs on an H100 (23 %).
ANCHORS = {  # model: share of the peak, width, tokens
    "S/16 at 224 px": (0.35, 384, 197),
    "B/16 at 224 px": (0.45, 768, 197),
    "L/16 at 224 px": (0.50, 1024, 197),
    "L/16 at 384 px": (0.50, 1024, 577),
    "H/14 at 224 px": (0.50, 1280, 257),
    "H/14 at 518 px": (0.46, 1280, 1370),
}
_TINY_MFU, _TINY_WIDTH = 0.20, 256  # below it kernels are too small to fill a GPU
_CONVOLUTION_MFU = 0.30

# CPU seconds of a process for 296 parameter tensors (ViT-L/16 has as many), so small that only launching them counts:
# launch/bench/records/overhead.txt, bf16, blocks not compiled. A server's core is assumed to be twice as fast.
_MEASURED_TENSORS, _CORE_SPEED = 296, 2.0
PASS_SECONDS: dict[ZeroKind, float] = {"ddp": 0.0218, 1: 0.0199, 2: 0.0398, 3: 0.1943}
"""Forward and backward pass under each engine."""
STEP_SECONDS: dict[ZeroKind, float] = {"ddp": 0.0077, 1: 0.0023, 2: 0.0030, 3: 0.0214}
"""Optimizer step under each engine."""
_TENSORS_PER_BLOCK, _OTHER_TENSORS = 12, 8


@dataclass(frozen=True)
class Speed:
    """Speed of one GPU alone; `mfu`: None if the GPU is unknown; `basis`: the number's source."""

    images_per_second: float
    mfu: float | None
    basis: str
    kind: Literal["anchor", "given", "measured"]


def nearest_anchor(model: ModelConfig, *, tokens: int) -> tuple[float, str]:
    """Find the share of the peak, and its source, for a model that sees so many tokens; 0 tokens: a pure ResNet."""
    if model.kind == "resnet" or model.sizes.resnet_layers is not None:
        return _CONVOLUTION_MFU, "a guess for convolutions"
    if model.sizes.width < _TINY_WIDTH:
        return _TINY_MFU, f"a guess for widths below {_TINY_WIDTH}"

    def distance(name: str) -> tuple[float, float]:
        _, width, seen = ANCHORS[name]
        return abs(math.log(width / model.sizes.width)), abs(math.log(seen / max(tokens, 1)))

    name = min(ANCHORS, key=distance)
    return ANCHORS[name][0], f"anchor {name}"


def host_seconds(depth: int, *, zero_stage: ZeroKind, passes: int) -> float:
    """Estimate the processor time to launch one optimizer step of `passes` forward and backward passes."""
    share = (_TENSORS_PER_BLOCK * depth + _OTHER_TENSORS) / _MEASURED_TENSORS
    return share * (PASS_SECONDS[zero_stage] * passes + STEP_SECONDS[zero_stage]) / _CORE_SPEED

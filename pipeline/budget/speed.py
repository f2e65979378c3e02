"""Images/s of one GPU, from a share of its peak (MFU) or a measurement; and what that asks of disks and cores.

MFU is the FLOPs that the model needs, recomputation not counted, over the GPU's peak. The default shares are anchors,
not promises: what a well-tuned run of such a model reaches on a Hopper GPU in bf16. Small models, or few images at a
time, are bound by the processor that launches the kernels: `host_seconds`.

Reading is estimated from one benchmark (launch/bench/records/data.txt: photographs of 107 kB and 0.2 megapixels,
cropped to 224 px, one core of a Xeon): decoding grows with the image's bytes, the rest with the pixels of the crop.
`launch.bench.data` measures other images and processors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from model.config import ModelConfig
from pipeline.budget.communication import ZeroKind


@dataclass(frozen=True)
class Anchor:
    """A realistic share of the peak for one model and image size."""

    model: str
    image_size: int
    mfu: float
    width: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.model} at {self.image_size} px"


# Targets for one H200 in bf16, not bound by data. S/16: between a TPU v3-8 (90 epochs of ImageNet in 6 to 7 hours) and
# measurements of small ViTs on an H100 (23 %).
ANCHORS = (
    Anchor("S/16", 224, 0.35, width=384, tokens=197),
    Anchor("B/16", 224, 0.45, width=768, tokens=197),
    Anchor("L/16", 224, 0.50, width=1024, tokens=197),
    Anchor("L/16", 384, 0.50, width=1024, tokens=577),
    Anchor("H/14", 224, 0.50, width=1280, tokens=257),
    Anchor("H/14", 518, 0.46, width=1280, tokens=1370),
)
_TINY_MFU, _TINY_WIDTH = 0.20, 256  # below it kernels are too small to fill a GPU
_CONVOLUTION_MFU = 0.30

# CPU seconds of a process for 296 parameter tensors, as many as ViT-L/16 has, each so small that launching them is all:
# launch/bench/records/overhead.txt, bf16, blocks not compiled. A server's core is assumed to be twice as fast.
_MEASURED_TENSORS, _CORE_SPEED = 296, 2.0
PASS_SECONDS: dict[ZeroKind, float] = {"ddp": 0.0218, 1: 0.0199, 2: 0.0398, 3: 0.1943}
"""Forward and backward pass under each engine."""
STEP_SECONDS: dict[ZeroKind, float] = {"ddp": 0.0077, 1: 0.0023, 2: 0.0030, 3: 0.0214}
"""Optimizer step under each engine."""
_TENSORS_PER_BLOCK, _OTHER_TENSORS = 12, 8

_BENCH_IMAGE_BYTES, _BENCH_PIXELS = 107_000, 224
_DECODE_MS, _REST_MS = 0.99, 0.36  # of the 1.35 ms of CPU time an image in all


@dataclass(frozen=True)
class Speed:
    """Speed of one GPU alone; `mfu`: None if the GPU is unknown; `basis`: the number's source."""

    images_per_second: float
    mfu: float | None
    basis: str
    kind: Literal["anchor", "given", "measured"]


def nearest_anchor(model: ModelConfig, *, tokens: int) -> tuple[float, str]:
    """(share of the peak, its source) for a model that sees so many tokens; 0 tokens: a pure ResNet."""
    if model.kind == "resnet" or model.sizes.resnet_layers is not None:
        return _CONVOLUTION_MFU, "a guess for convolutions"
    if model.sizes.width < _TINY_WIDTH:
        return _TINY_MFU, f"a guess for widths below {_TINY_WIDTH}"

    def distance(anchor: Anchor) -> tuple[float, float]:
        return abs(math.log(anchor.width / model.sizes.width)), abs(math.log(anchor.tokens / max(tokens, 1)))

    anchor = min(ANCHORS, key=distance)
    return anchor.mfu, f"anchor {anchor.name}"


def speed_at(
    mfu: float, *, training_flops: float, peak_flops: float, basis: str, kind: Literal["anchor", "given"]
) -> Speed:
    """Images/s at a share of the peak."""
    return Speed(mfu * peak_flops / training_flops, mfu, basis, kind)


def measured_speed(images_per_second: float, *, training_flops: float, peak_flops: float | None, basis: str) -> Speed:
    """A measured speed, and its share of the peak."""
    mfu = images_per_second * training_flops / peak_flops if peak_flops else None
    return Speed(images_per_second, mfu, basis, "measured")


def host_seconds(depth: int, *, zero_stage: ZeroKind, passes: int) -> float:
    """Estimated processor time to launch one optimizer step of `passes` forward and backward passes."""
    share = (_TENSORS_PER_BLOCK * depth + _OTHER_TENSORS) / _MEASURED_TENSORS
    return share * (PASS_SECONDS[zero_stage] * passes + STEP_SECONDS[zero_stage]) / _CORE_SPEED


@dataclass(frozen=True)
class Reading:
    """Reading and decoding needed to keep the GPUs busy."""

    images_per_second: float  # of all GPUs together
    bytes_per_second: float | None  # of the shards, over all nodes; None: their size is not known
    decode_ms: float  # processor time of one image
    cores: float  # kept busy by decoding, over all nodes
    assumed_image_bytes: float | None = None  # of an image on average, where it is not known; None: it is


def reading(images_per_second: float, *, image_bytes: float | None, image_size: int) -> Reading:
    """Reading of images of `image_bytes` on average; None: the benchmark's, scaled down for a smaller `image_size`."""
    size = image_bytes
    if size is None:
        size = _BENCH_IMAGE_BYTES * min(1.0, (image_size / _BENCH_PIXELS) ** 2)
    decode_ms = _DECODE_MS * size / _BENCH_IMAGE_BYTES + _REST_MS * (image_size / _BENCH_PIXELS) ** 2
    return Reading(
        images_per_second,
        bytes_per_second=None if image_bytes is None else images_per_second * image_bytes,
        decode_ms=decode_ms,
        cores=images_per_second * decode_ms / 1000,
        assumed_image_bytes=size if image_bytes is None else None,
    )

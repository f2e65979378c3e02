"""Estimate images/s of one GPU, from a share of its peak (MFU) or a measurement, and the reading and workers it needs.

MFU: the model's FLOPs, without recomputation, over the GPU's peak. Default shares are anchors, not promises: a
well-tuned run on a Hopper GPU in bf16. They also set the number of workers, before any step is measured. Small models
and batches are bound by the CPU that launches kernels (`host_seconds`).

Reading scales one benchmark (launch/bench/records/data.txt: photographs of 107 kB and 0.2 megapixels, cropped to 224
px, one EPYC core): decoding with an image's bytes, the rest with the crop's pixels (`launch.bench.data` for others).
Too many workers cost only memory, too few make the GPU wait: hence a margin, and all cores but one for an unknown GPU.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from shardvit.data_shards.loading.memory import ahead_bytes, staged_bytes
from shardvit.model.config import ModelConfig
from shardvit.model.vocabulary import COLOUR_CHANNELS
from shardvit.pipeline.budget.communication import ZeroKind
from shardvit.pipeline.budget.cost import stage_cost
from shardvit.pipeline.budget.gpus import Gpu
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import StageName

# Targets for one H200 in bf16, not data-bound. S/16: between a TPU v3-8 (90 epochs of ImageNet in 6 to 7 hours)
# and measurements of small ViTs on an H100 (23 %).
ANCHORS = {  # model: share of the peak, width, tokens
    "S/16 at 224 px": (0.35, 384, 197),
    "B/16 at 224 px": (0.45, 768, 197),
    "L/16 at 224 px": (0.50, 1024, 197),
    "L/16 at 384 px": (0.50, 1024, 577),
    "H/14 at 224 px": (0.50, 1280, 257),
    "H/14 at 518 px": (0.46, 1280, 1370),
}
_TINY_MFU, _TINY_WIDTH = 0.20, 256  # narrower: kernels too small to fill a GPU
_CONVOLUTION_MFU = 0.30

# CPU seconds of a process for 296 parameter tensors (as many as ViT-L/16), so small that only kernel launches count:
# launch/bench/records/overhead.txt, bf16, blocks not compiled. A server's core is assumed twice as fast.
_MEASURED_TENSORS, _CORE_SPEED = 296, 2.0
PASS_SECONDS: dict[ZeroKind, float] = {"ddp": 0.0230, 1: 0.0249, 2: 0.0258, 3: 0.1680}
"""Forward and backward pass."""
STEP_SECONDS: dict[ZeroKind, float] = {"ddp": 0.0085, 1: 0.0027, 2: 0.0031, 3: 0.0219}
"""Optimizer step."""
_TENSORS_PER_BLOCK, _OTHER_TENSORS = 12, 8


MOST_WORKERS = 32  # started by `auto`; enough for one GPU and images of 0.2 megapixels
_MARGIN = 1.3  # over the workers that just keep up, as images and scheduling vary
_BENCH_IMAGE_BYTES, _BENCH_PIXELS = 107_000, 224
_DECODE_MS, _REST_MS = 1.01, 0.26  # of the 1.27 ms of CPU time for an image


@dataclass(frozen=True)
class Speed:
    """Speed of one GPU alone; `mfu`: None if the GPU is unknown; `basis`: source of the number."""

    images_per_second: float
    mfu: float | None
    basis: str
    kind: Literal["anchor", "given", "measured"]


def nearest_anchor(model: ModelConfig, *, tokens: int) -> tuple[float, str]:
    """Find the share of the peak, and its source, for a model and its number of tokens (0: pure ResNet)."""
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
    """Estimate the CPU time to launch one optimizer step of `passes` forward and backward passes."""
    share = (_TENSORS_PER_BLOCK * depth + _OTHER_TENSORS) / _MEASURED_TENSORS
    return share * (PASS_SECONDS[zero_stage] * passes + STEP_SECONDS[zero_stage]) / _CORE_SPEED


@dataclass(frozen=True)
class Reading:
    """Reading and decoding that keep the GPUs busy."""

    images_per_second: float  # of all GPUs together
    bytes_per_second: float | None  # read from shards, over all nodes; None: their size is unknown
    decode_ms: float  # CPU time per image
    cores: float  # busy with decoding, over all nodes
    assumed_image_bytes: float | None = None  # assumed mean size; None: the size is known


def reading(images_per_second: float, *, image_bytes: float | None, image_size: int) -> Reading:
    """Forecast reading; `image_bytes`: mean; None: the benchmark's, less for a small `image_size`."""
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


@dataclass(frozen=True)
class ReadingAhead:
    """Data workers of one process and their host memory."""

    workers: int  # from the recipe, or auto with enough cores
    ahead_bytes: int  # micro-batches read ahead
    page_locked_bytes: int  # on the way to the GPU


def reading_ahead(
    recipe: Recipe, *, image_size: int, micro_batch: int, decode_seconds: float, speed: float
) -> ReadingAhead:
    """Forecast workers and memory; `speed`: the GPU's images/s."""
    workers = recipe.data.workers
    if workers == "auto":
        workers = min(MOST_WORKERS, workers_needed(decode_seconds=decode_seconds, images_per_second=speed))
    channels = recipe.model.channels
    pixel_bytes = 4 * channels if channels != COLOUR_CHANNELS else 3  # float32, or colours of 8 bits
    return ReadingAhead(
        workers,
        ahead_bytes(workers, images=micro_batch, image_size=image_size, pixel_bytes=pixel_bytes),
        staged_bytes(micro_batch, image_size=image_size, pixel_bytes=pixel_bytes),
    )


def workers_needed(*, decode_seconds: float, images_per_second: float) -> int:
    """Count workers that keep a GPU busy; at least 1."""
    return max(1, math.ceil(_MARGIN * decode_seconds * images_per_second))


def workers_within(cores: float, *, needed: int | None) -> int:
    """Limit workers `needed` (None: unknown) to the process's cores, less one for the training loop."""
    most = max(1, min(MOST_WORKERS, int(cores) - 1))
    return most if needed is None else min(needed, most)


def anchored_speed(recipe: Recipe, *, stage: StageName, num_classes: int, gpu: Gpu) -> tuple[float, str]:
    """Estimate images/s of one GPU in a stage, with the smallest of its images; returns its source, too."""
    smallest = {"image_size": recipe.image_sizes(stage)[0]}
    config = recipe.train_stage(stage).model_copy(update=smallest)
    cost = stage_cost(recipe.model, stage=config, engine=recipe.engine, num_classes=num_classes)
    mfu, basis = nearest_anchor(recipe.model, tokens=cost.tokens)
    return mfu * gpu.peak_flops(recipe.engine.precision) / cost.training_flops, basis


def own_cores(
    mine: Collection[int], *, on_this_host: Sequence[Collection[int]], quota_cores: float | None = None
) -> float:
    """Count one process's cores, each divided by the number of processes that may use it (one, if SLURM binds cores).
    `on_this_host`: cores of each process, this one included; `quota_cores`: the container's limit for all of them."""
    share = sum(1 / sum(core in other for other in on_this_host) for core in mine)
    return share if quota_cores is None else min(share, quota_cores / len(on_this_host))

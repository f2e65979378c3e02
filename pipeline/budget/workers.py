"""Choose the number of data workers from decoding time, GPU speed and the process's cores.

The GPU's speed before its first step is the plan's anchor for such a model. Too many workers cost memory and little
else; too few make the GPU wait. So there is a margin, and where the GPU is not known, all cores but one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from data_shards.loading.memory import ahead_bytes, staged_bytes
from pipeline.budget.cost import stage_cost
from pipeline.budget.gpus import Gpu
from pipeline.budget.speed import nearest_anchor
from pipeline.recipe.schema import Recipe
from pipeline.recipe.vocabulary import StageName

MOST_WORKERS = 32  # that `auto` starts; more of them on one GPU is more than an image of 0.2 megapixels needs
_MARGIN = 1.3  # of the workers that would just keep up: images differ, and so do a worker's turns


@dataclass(frozen=True)
class ReadingAhead:
    """The data workers of one process, and the host memory that they take."""

    workers: int  # the recipe's, or what auto takes of enough cores
    ahead_bytes: int  # micro-batches that they have read
    page_locked_bytes: int  # on the way to the GPU


def reading_ahead(
    recipe: Recipe, *, image_size: int, micro_batch: int, decode_seconds: float, speed: float
) -> ReadingAhead:
    """Workers and memory for a GPU that trains on `speed` images/s."""
    workers = recipe.data.workers
    if workers == "auto":
        workers = min(MOST_WORKERS, workers_needed(decode_seconds=decode_seconds, images_per_second=speed))
    return ReadingAhead(
        workers,
        ahead_bytes(workers, images=micro_batch, image_size=image_size),
        staged_bytes(micro_batch, image_size=image_size),
    )


def workers_needed(*, decode_seconds: float, images_per_second: float) -> int:
    """Workers that keep a GPU of `images_per_second` busy; at least 1."""
    return max(1, math.ceil(_MARGIN * decode_seconds * images_per_second))


def workers_within(cores: float, *, needed: int | None) -> int:
    """Limit the workers `needed` (None: not known) to the process's cores, less one for the training loop."""
    most = max(1, min(MOST_WORKERS, int(cores) - 1))
    return most if needed is None else min(needed, most)


def anchored_speed(recipe: Recipe, *, stage: StageName, num_classes: int, gpu: Gpu) -> tuple[float, str]:
    """Images/s expected of one GPU in a stage, and what that is based on."""
    config = recipe.train_stage(stage)
    cost = stage_cost(recipe.model, stage=config, engine=recipe.engine, num_classes=num_classes)
    mfu, basis = nearest_anchor(recipe.model, tokens=cost.tokens)
    return mfu * gpu.peak_flops(recipe.engine.precision) / cost.training_flops, basis


def own_cores(
    mine: Collection[int], *, on_this_host: Sequence[Collection[int]], quota_cores: float | None = None
) -> float:
    """Cores of one process: each that it may use, shared with the processes of this host that may use it as well.

    `on_this_host` has the sets of all its processes, this one's included; `quota_cores` is what a container grants all
    of them together. Under SLURM each may have cores of its own; elsewhere all have the same set.
    """
    share = sum(1 / sum(core in other for other in on_this_host) for core in mine)
    return share if quota_cores is None else min(share, quota_cores / len(on_this_host))

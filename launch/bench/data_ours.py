"""Our data path for the data benchmark: the transform, also for peers that are given it, and the loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_shards.images.crops import DRAWS_PER_SAMPLE
from data_shards.images.decode import read_image
from data_shards.images.transforms import TrainTransform
from data_shards.loading.assemble import Access
from data_shards.loading.batch import Batch
from data_shards.loading.loader import Layout, TrainBatches, TrainLoader
from data_shards.order.mixture import make_order
from data_shards.reading.opening import open_shards
from launch.bench.data_methods import BATCH_IMAGES, CROP_AREA, PIXELS, WORKERS

OURS = TrainTransform(PIXELS, crop_area=CROP_AREA)
_SEED = 1
_LANES = 64  # as `data.lanes: auto` for this batch
_WINDOW_IMAGES = 16384  # the recipe's default


def fast_transform() -> Callable[[bytes], Any]:
    """Our transform as a function: bytes of a JPEG -> torch uint8 [224, 224, 3], with its own random numbers."""
    import torch

    rng = np.random.default_rng()

    def transform(content: bytes) -> torch.Tensor:
        pixels, _ = OURS(read_image(content), draws=rng.random(DRAWS_PER_SAMPLE))
        return torch.from_numpy(pixels)

    return transform


def batches(folder: Path, *, kind: Literal["thread", "process"] = "thread", start_step: int = 0) -> Iterator[Batch]:
    """The training stream over packed shards, from a step on, without end."""
    shards = open_shards(str(folder), report=lambda _: None)
    order = make_order(
        [shards.shard_sizes],
        weights=None,
        seed=_SEED,
        lanes=_LANES,
        global_batch_images=BATCH_IMAGES,
        window_images=_WINDOW_IMAGES,
    )
    layout = Layout(rank=0, world_size=1, micro_batch_size=BATCH_IMAGES, accumulation_steps=1)
    stream = TrainBatches(Access(shards), order=order, transform=OURS, layout=layout, seed=_SEED)
    return iter(TrainLoader(stream, start_step=start_step, stop_step=1 << 40, workers=WORKERS, kind=kind))


def steps_of_epoch(folder: Path) -> int:
    """Batches of an epoch, rounded down."""
    return open_shards(str(folder), report=lambda _: None).num_samples // BATCH_IMAGES

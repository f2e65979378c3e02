"""Our data path as the pipeline uses it, for the benchmark: the loader, and the order of its samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from data_shards.loading.assemble import Access
from data_shards.loading.batch import Batch
from data_shards.loading.loader import Layout, TrainBatches, TrainLoader
from data_shards.order.mixture import make_order
from data_shards.reading.opening import open_shards
from data_shards.shards.shard_set import ShardSet
from launch.bench.data_fast import OURS
from launch.bench.data_methods import BATCH_IMAGES, WORKERS, WorkerKind

_SEED = 1
_LANES = 64  # what `data.lanes: auto` makes of this batch
_WINDOW_IMAGES = 16384  # the recipe's default


def stream_of(shards: ShardSet) -> TrainBatches:
    """The training stream that such a recipe has."""
    return TrainBatches(
        Access(shards),
        order=make_order(
            [shards.shard_sizes],
            weights=None,
            seed=_SEED,
            lanes=_LANES,
            global_batch_images=BATCH_IMAGES,
            window_images=_WINDOW_IMAGES,
        ),
        transform=OURS,
        layout=Layout(rank=0, world_size=1, micro_batch_size=BATCH_IMAGES, accumulation_steps=1),
        seed=_SEED,
    )


def batches(folder: Path, *, kind: WorkerKind = "thread", start_step: int = 0) -> Iterator[Batch]:
    """The training stream over packed shards, from a step on, without end."""
    stream = stream_of(open_shards(str(folder), report=lambda _: None))
    return iter(TrainLoader(stream, start_step=start_step, stop_step=1 << 40, workers=WORKERS, kind=kind))


def steps_of_epoch(folder: Path) -> int:
    """Batches that make an epoch, rounded down."""
    return open_shards(str(folder), report=lambda _: None).num_samples // BATCH_IMAGES

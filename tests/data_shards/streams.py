"""Make a small set of noise images, and list what training sees of a sample, for the tests of the stream."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from shardvit.data_shards.images.size_phases import SizePhase
from shardvit.data_shards.images.transforms import TrainTransform
from shardvit.data_shards.loading.assemble import Access
from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.loading.loader import Layout, TrainBatches, TrainLoader
from shardvit.data_shards.loading.mixing import MixupConfig
from shardvit.data_shards.order import mixture
from shardvit.data_shards.order.mixture import AnyOrder
from shardvit.data_shards.order.sample_order import Order
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.vocabulary import WorkerKind

LANES, GLOBAL_BATCH, STEPS, SEED, SIZE = 4, 8, 50, 11, 12
TRANSFORM = TrainTransform(SIZE)


def pack_noise(folder: Path, *, count: int, samples_per_shard: int) -> ShardSet:
    """Noise images of many sizes and two formats, packed."""
    draw = np.random.default_rng(count)
    for number in range(count):
        name = "cat" if number % 3 else "dog"
        (folder / "in" / name).mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (*draw.integers(6, 30, 2), 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "in" / name / f"{number}.{'png' if number % 2 else 'jpg'}")
    pack(str(folder / "in"), folder / "out", samples_per_shard=samples_per_shard, report=lambda line: None)
    return open_shards(str(folder / "out" / "train"))


def make_order(shards: ShardSet, *, seed: int = SEED) -> Order:
    return Order(shards.shard_sizes, seed=seed, lanes=LANES, global_batch_images=GLOBAL_BATCH, window_images=10)


def repeated_order(shards: ShardSet, *, repeats: int, seed: int = SEED) -> AnyOrder:
    """Two lanes, so that each gives two different images to a batch."""
    cut = {"lanes": 2, "global_batch_images": GLOBAL_BATCH, "window_images": 10}
    return mixture.make_order([shards.shard_sizes], weights=None, seed=seed, repeats=repeats, **cut)


def train_batches(
    shards: ShardSet,
    *,
    rank: int = 0,
    world_size: int = 1,
    accumulation_steps: int = 1,
    seed: int = SEED,
    mixup: MixupConfig | None = None,
    repeats: int = 1,
    transform: TrainTransform = TRANSFORM,
    phases: Sequence[SizePhase] = (),
    **access: Any,
) -> TrainBatches:
    layout = Layout(rank, world_size, GLOBAL_BATCH // world_size // accumulation_steps, accumulation_steps)
    return TrainBatches(
        Access(shards, **access),
        order=repeated_order(shards, seed=seed, repeats=repeats) if repeats > 1 else make_order(shards, seed=seed),
        transform=transform,
        layout=layout,
        seed=seed,
        mixup=mixup,
        phases=phases,
    )


def micro_batches(
    shards: ShardSet,
    *,
    start_step: int = 0,
    stop_step: int = STEPS,
    workers: int = 0,
    kind: WorkerKind = "process",
    **options: Any,
) -> Iterator[Batch]:
    batches = train_batches(shards, **options)
    for batch in TrainLoader(batches, start_step=start_step, stop_step=stop_step, workers=workers, kind=kind):
        assert batch.counted.all()
        yield batch


@dataclass(frozen=True)
class Seen:
    """Everything of a sample that training can see."""

    key: str
    label: int
    sample: int
    epoch: int
    mirrored: bool
    pixels: bytes


def seen(batch: Batch) -> list[Seen]:
    assert batch.images.dtype == torch.uint8 and batch.images.shape == (len(batch.keys), SIZE, SIZE, 3)
    columns = (batch.keys, batch.labels, batch.samples, batch.epochs, batch.mirrored, batch.images)
    return [
        Seen(key, int(label), int(sample), int(epoch), bool(mirrored), pixels.numpy().tobytes())
        for key, label, sample, epoch, mirrored, pixels in zip(*columns, strict=True)
    ]


def global_batches(
    shards: ShardSet, *, world_size: int, accumulation_steps: int = 1, **options: Any
) -> list[list[Seen]]:
    """The first 50, from what all the ranks see: their micro-batches of a step, rank after rank."""
    steps: list[list[Seen]] = [[] for _ in range(STEPS)]
    for rank in range(world_size):
        stream = list(
            micro_batches(shards, rank=rank, world_size=world_size, accumulation_steps=accumulation_steps, **options)
        )
        assert len(stream) == STEPS * accumulation_steps
        for number, batch in enumerate(stream):
            assert len(batch.keys) == GLOBAL_BATCH // world_size // accumulation_steps
            steps[number // accumulation_steps] += seen(batch)
    return steps

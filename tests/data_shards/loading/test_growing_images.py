"""The stream of images that grow: their sizes depend on the step alone, their samples and crops on neither."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardvit.data_shards.images.size_phases import SizePhase, size_at
from shardvit.data_shards.images.transforms import TrainTransform
from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.loading.mixing import MixupConfig, draw_mix
from shardvit.data_shards.shards.shard_set import ShardSet
from tests.data_shards.streams import GLOBAL_BATCH, SEED, SIZE, STEPS, micro_batches, pack_noise

PHASES = tuple(map(SizePhase, (0, 7, 19), (4, 8, SIZE)))
MIXUP = MixupConfig(cutmix_alpha=1.0)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    return pack_noise(tmp_path_factory.mktemp("noise"), count=60, samples_per_shard=9)


def stream(shards: ShardSet, **options: Any) -> Iterator[Batch]:
    return micro_batches(shards, phases=PHASES, mixup=MIXUP, **options)


@pytest.fixture(scope="module")
def alone(shards: ShardSet) -> list[Batch]:
    return list(stream(shards))


def test_sizes_follow_the_step_and_samples_and_crops_are_as_without(shards: ShardSet, alone: list[Batch]) -> None:
    sizes = [batch.images.shape[1:] for batch in alone]
    assert sizes == [(size_at(PHASES, step=step),) * 2 + (3,) for step in range(STEPS)]
    for step, plain in enumerate(micro_batches(shards, mixup=MIXUP)):
        grown = alone[step]
        assert torch.equal(grown.samples, plain.samples) and torch.equal(grown.mirrored, plain.mirrored)
        assert grown.mix == draw_mix(MIXUP, seed=SEED, step=step, image_size=grown.images.shape[1])
        assert torch.equal(grown.images, plain.images) == (step >= 19)


@pytest.mark.parametrize(
    "how",
    [
        {"workers": 2, "kind": "thread"},
        pytest.param({"workers": 2, "kind": "process"}, marks=pytest.mark.slow),
        {"start_step": 6},
        {"start_step": 7},
        {"start_step": 19},
    ],
)
def test_workers_and_starts_give_the_same(shards: ShardSet, alone: list[Batch], how: dict[str, Any]) -> None:
    start = how.get("start_step", 0)
    for ours, theirs in zip(stream(shards, **how), alone[start:], strict=True):
        assert torch.equal(ours.images, theirs.images) and ours.mix == theirs.mix


@pytest.mark.parametrize(("world_size", "accumulation_steps"), [(2, 1), (2, 2), (4, 1)])
def test_processes_give_the_same(
    shards: ShardSet, alone: list[Batch], world_size: int, accumulation_steps: int
) -> None:
    parts = [
        list(stream(shards, rank=rank, world_size=world_size, accumulation_steps=accumulation_steps))
        for rank in range(world_size)
    ]
    for step, whole in enumerate(alone):
        micro = slice(step * accumulation_steps, (step + 1) * accumulation_steps)
        own = torch.cat([batch.images[:-1] for part in parts for batch in part[micro]])  # the last row is mixed in
        assert torch.equal(own, whole.images[:GLOBAL_BATCH])


def test_a_short_side_that_is_resized_first_keeps_its_ratio() -> None:
    whole = TrainTransform(384, crop="resize_and_crop", resize_size=448)
    assert whole.at(384) == whole and whole.at(192).resize_size == 224
    assert TrainTransform(24, crop="resize_and_crop", resize_size=24).at(20).resize_size == 20
    assert TrainTransform(24).at(20) == TrainTransform(20)

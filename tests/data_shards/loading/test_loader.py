"""The law of the project: one stream of augmented samples, whatever the processes, workers, micro-batches, restarts."""

import io
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shardvit.data_shards.images.crops import DRAWS_PER_SAMPLE
from shardvit.data_shards.images.decode import read_image
from shardvit.data_shards.images.rand_augment import RandAugment
from shardvit.data_shards.images.transforms import EvalTransform
from shardvit.data_shards.loading import loader
from shardvit.data_shards.loading.assemble import Access
from shardvit.data_shards.loading.loader import EvalBatches, TrainLoader, eval_batches
from shardvit.data_shards.order.randomness import uniforms
from shardvit.data_shards.reading.shard_reader import ShardReader
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.pipeline.stage.batches import OwnAugment
from tests.data_shards.streams import (
    GLOBAL_BATCH,
    SEED,
    SIZE,
    STEPS,
    TRANSFORM,
    Seen,
    global_batches,
    make_order,
    micro_batches,
    pack_noise,
    seen,
    train_batches,
)
from tests.own_training import write_example

# torch tells machines with fewer cores than workers; that is not what these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """61 noise images of many sizes in 7 shards: nothing divides anything. 50 steps are 6.6 epochs."""
    return pack_noise(tmp_path_factory.mktemp("noise"), count=61, samples_per_shard=9)


@pytest.fixture(scope="module")
def reference(shards: ShardSet) -> list[list[Seen]]:
    """Computed without a loader, batch or rank, a sample at a time."""
    order, reader, steps = make_order(shards), ShardReader(shards), []
    for step in range(STEPS):
        refs, batch = order.rank_batch(step, rank=0, world_size=1), []
        for at in range(GLOBAL_BATCH):
            shard, row, epoch, sample = (int(column[at]) for column in (refs.shard, refs.row, refs.epoch, refs.sample))
            raw = reader.read(shard, row=row)
            draws = uniforms(3, SEED, epoch, sample, draws=DRAWS_PER_SAMPLE)[0]
            square, mirrored = TRANSFORM(read_image(raw.image), draws=draws)
            batch.append(Seen(raw.key, *raw.labels, sample, epoch, mirrored, square.tobytes()))
        steps.append(batch)
    reader.close()
    return steps


# ---- one stream


@pytest.mark.parametrize(("world_size", "accumulation_steps", "workers"), [(1, 1, 0), (4, 1, 0), (2, 2, 1), (1, 1, 3)])
def test_the_first_50_global_batches_are_the_same_for_all(
    shards: ShardSet, reference: list[list[Seen]], world_size: int, accumulation_steps: int, workers: int
):
    found = global_batches(shards, world_size=world_size, accumulation_steps=accumulation_steps, workers=workers)
    assert found == reference


def test_worker_threads_do_not_change_what_rand_augment_draws(shards: ShardSet):
    transform = replace(TRANSFORM, rand_augment=RandAugment(num_ops=2, magnitude=9))
    alone = global_batches(shards, world_size=1, transform=transform)
    assert alone == global_batches(shards, world_size=2, transform=transform, workers=3, kind="thread")


@pytest.mark.parametrize("options", [{"world_size": 2}, {"workers": 2}, {"workers": 3, "kind": "thread"}])
def test_own_augmentation_sees_the_same_crops_and_draws_from_each_samples_own_stream(
    shards: ShardSet, reference: list[list[Seen]], tmp_path: Path, options: dict[str, Any]
):
    mine = write_example(tmp_path)
    untouched = replace(TRANSFORM, own=lambda image, generator: image)
    assert global_batches(shards, world_size=1, transform=untouched) == reference
    transform = replace(TRANSFORM, own=OwnAugment(f"{mine}:noise"))
    changed = global_batches(shards, world_size=1, transform=transform)
    assert changed == global_batches(shards, **{"world_size": 1, "transform": transform, **options})
    later = [seen(batch) for batch in micro_batches(shards, start_step=20, transform=transform)]
    assert later == changed[20:]
    pairs = [(one, other) for a, b in zip(reference, changed, strict=True) for one, other in zip(a, b, strict=True)]
    assert all(replace(one, pixels=b"") == replace(other, pixels=b"") for one, other in pairs)
    noises = {(np.frombuffer(b.pixels, np.uint8) - np.frombuffer(a.pixels, np.uint8)).tobytes() for a, b in pairs}
    assert len(noises) == len(pairs)  # another one for each sample and epoch


@pytest.mark.parametrize(
    ("planned_images", "options"), [(1, {"accumulation_steps": 2}), (24, {"workers": 2, "kind": "thread"}), (100, {})]
)
def test_how_much_is_planned_at_once_does_not_change_the_stream(
    shards: ShardSet,
    reference: list[list[Seen]],
    monkeypatch: pytest.MonkeyPatch,
    planned_images: int,
    options: dict[str, Any],
):
    monkeypatch.setattr(loader, "_PLANNED_IMAGES", planned_images)
    assert global_batches(shards, world_size=2, **options) == reference


def test_the_stream_is_what_it_is_meant_to_be(shards: ShardSet, reference: list[list[Seen]]):
    """Guards the reference: every sample once an epoch, its own label, another crop each time, half of them flipped."""
    order = make_order(shards)
    stream = [one for step in reference for one in step]
    for epoch in range(6):
        assert sorted(one.sample for one in stream if one.epoch == epoch) == list(range(61))
    assert all(shards.classes[one.label] == one.key.split("_")[0] for one in stream)
    assert [[one.sample for one in step] for step in reference] == [
        order.rank_batch(step, rank=0, world_size=1).sample.tolist() for step in range(STEPS)
    ]
    looks = {(one.sample, one.pixels) for one in stream}
    assert len(looks) > 0.95 * len(stream)  # the smallest images may be cropped alike twice
    assert 0.4 < np.mean([one.mirrored for one in stream]) < 0.6  # 400 of them: 4 standard deviations


@pytest.mark.parametrize("options", [{"world_size": 2, "workers": 2, "kind": "thread"}, {"accumulation_steps": 4}])
def test_repeats_of_an_image_are_in_its_batch_and_look_different(shards: ShardSet, options: dict[str, Any]):
    alone = global_batches(shards, world_size=1, repeats=2)
    assert global_batches(shards, **{"world_size": 1, "repeats": 2, **options}) == alone
    later = [seen(batch) for batch in micro_batches(shards, start_step=20, repeats=2)]
    assert later == alone[20:]
    pairs = 0
    for step in alone:
        by_image: dict[tuple[int, int], set[tuple[bytes, bool]]] = {}
        for one in step:
            by_image.setdefault((one.sample, one.epoch // 2), set()).add((one.pixels, one.mirrored))
        assert len(by_image) == GLOBAL_BATCH // 2
        pairs += sum(len(looks) == 2 for looks in by_image.values())
    assert pairs > 0.95 * STEPS * GLOBAL_BATCH / 2  # the smallest images may be cropped alike twice


def test_another_seed_is_another_stream(shards: ShardSet, reference: list[list[Seen]]):
    other = [one for batch in micro_batches(shards, seed=SEED + 1) for one in seen(batch)]
    stream = [one for step in reference for one in step]
    assert sum(a.key == b.key for a, b in zip(stream, other, strict=True)) < 30  # 1 in 61 by chance
    # The crops are others as well, not only in another order.
    pixels = {(one.sample, one.epoch): one.pixels for one in stream}
    both = [one for one in other if (one.sample, one.epoch) in pixels]
    assert sum(pixels[one.sample, one.epoch] == one.pixels for one in both) < 0.05 * len(both)


# ---- resuming


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_that_are_passed_over_are_missing_and_nothing_else(
    shards: ShardSet, reference: list[list[Seen]], workers: int
):
    passed_over = {0, 7, 8, 23, STEPS - 1}
    for start in (0, 8, 20):
        loader = TrainLoader(
            train_batches(shards, accumulation_steps=2),
            start_step=start,
            stop_step=STEPS,
            passed_over=passed_over,
            workers=workers,
            kind="thread",
        )
        with closing(loader):
            stream, done = zip(*((seen(batch), loader.step) for batch in loader), strict=True)
        steps = [first + second for first, second in zip(stream[::2], stream[1::2], strict=True)]
        expected = [step for step in range(start, STEPS) if step not in passed_over]
        assert steps == [reference[step] for step in expected]
        assert list(done[1::2]) == [step + 1 for step in expected]  # where it stands, and would be resumed


# ---- evaluation


def test_evaluation_shows_the_whole_image_and_workers_change_nothing(shards: ShardSet):
    dataset = EvalBatches(Access(shards), transform=EvalTransform(SIZE), rank=0, world_size=2, batch_size=4)
    alone = [seen(batch) for batch in eval_batches(dataset, workers=0)]
    assert alone == [seen(batch) for batch in eval_batches(dataset, workers=1)]
    assert alone == [seen(batch) for batch in eval_batches(dataset, workers=3, kind="thread")]
    reader = ShardReader(shards)
    for one in (one for batch in alone for one in batch):
        shard, row = divmod(one.sample, 9)
        if shards.shards[shard].num_samples == 9 and reader.read(shard, row=row).image[:2] != b"\xff\xd8":
            assert np.array(Image.open(io.BytesIO(reader.read(shard, row=row).image))).shape[2] == 3
            assert EvalTransform(SIZE)(read_image(reader.read(shard, row=row).image)).tobytes() == one.pixels


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_does_not_move_the_global_random_numbers(shards: ShardSet, workers: int):
    torch.manual_seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    list(micro_batches(shards, workers=workers, stop_step=3))
    dataset = EvalBatches(Access(shards), transform=EvalTransform(SIZE), rank=0, world_size=1, batch_size=30)
    list(eval_batches(dataset, workers=workers))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]

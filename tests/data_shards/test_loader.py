"""The law of the project: one stream of augmented samples, whatever the processes, workers, micro-batches, restarts."""

import contextlib
import io
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from data_shards.batch import Batch
from data_shards.errors import SampleError
from data_shards.loader import (
    EvalBatches,
    Layout,
    TrainBatches,
    eval_loader,
    train_loader,
)
from data_shards.manifest import Manifest
from data_shards.order import Order
from data_shards.pack import pack
from data_shards.randomness import uniforms
from data_shards.shard_reader import ShardReader
from data_shards.tar_index import open_index
from data_shards.transforms import DRAWS_PER_SAMPLE, EvalTransform, TrainTransform

# torch tells machines with fewer cores than workers; that is not what these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

LANES, GLOBAL_BATCH, STEPS, SEED, SIZE = 4, 8, 50, 11, 12
TRANSFORM = TrainTransform(SIZE)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """61 noise images of many sizes in 7 shards: nothing divides anything. 50 steps are 6.6 epochs."""
    return pack_noise(tmp_path_factory.mktemp("noise"), count=61, samples_per_shard=9)


def pack_noise(folder: Path, *, count: int, samples_per_shard: int) -> Manifest:
    draw = np.random.default_rng(count)
    for number in range(count):
        name = "cat" if number % 3 else "dog"
        (folder / "in" / name).mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (*draw.integers(6, 30, 2), 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "in" / name / f"{number}.{'png' if number % 2 else 'jpg'}")
    report = pack(str(folder / "in"), folder / "out", samples_per_shard=samples_per_shard, report=lambda line: None)
    return report.train


def make_order(manifest: Manifest, *, seed: int = SEED) -> Order:
    sizes = [shard.num_samples for shard in manifest.shards]
    return Order(sizes, seed=seed, lanes=LANES, global_batch_images=GLOBAL_BATCH, window_images=10)


def micro_batches(
    manifest: Manifest,
    *,
    rank: int = 0,
    world_size: int = 1,
    accumulation_steps: int = 1,
    workers: int = 0,
    start_step: int = 0,
    stop_step: int = STEPS,
    seed: int = SEED,
) -> Iterator[Batch]:
    micro = GLOBAL_BATCH // world_size // accumulation_steps
    layout = Layout(rank, world_size, micro, accumulation_steps)
    dataset = TrainBatches(
        manifest, order=make_order(manifest, seed=seed), transform=TRANSFORM, layout=layout, seed=seed
    )
    batches = train_loader(dataset, layout=layout, start_step=start_step, stop_step=stop_step, workers=workers)
    for batch in batches:
        assert len(batch.keys) == micro and batch.counted.all()
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
    manifest: Manifest, *, world_size: int, accumulation_steps: int = 1, workers: int = 0
) -> list[list[Seen]]:
    """The first 50, from what all the ranks see: their micro-batches of a step, rank after rank."""
    steps: list[list[Seen]] = [[] for _ in range(STEPS)]
    for rank in range(world_size):
        stream = list(
            micro_batches(
                manifest,
                rank=rank,
                world_size=world_size,
                accumulation_steps=accumulation_steps,
                workers=workers,
            )
        )
        assert len(stream) == STEPS * accumulation_steps
        for number, batch in enumerate(stream):
            steps[number // accumulation_steps] += seen(batch)
    return steps


@pytest.fixture(scope="module")
def reference(manifest: Manifest) -> list[list[Seen]]:
    """Computed without a loader, batch or rank, a sample at a time."""
    order, reader, steps = make_order(manifest), ShardReader(manifest), []
    for step in range(STEPS):
        visits, batch = order.rank_batch(step, rank=0, world_size=1), []
        for at in range(GLOBAL_BATCH):
            shard, row, epoch, sample = (
                int(column[at]) for column in (visits.shard, visits.row, visits.epoch, visits.sample)
            )
            raw = reader.read(shard, row=row)
            draws = uniforms(3, SEED, epoch, sample, draws=DRAWS_PER_SAMPLE)[0]
            if raw.image[:2] == b"\xff\xd8":  # the JPEG decoder has its own tests
                from data_shards.decode import decode_rgb

                image = decode_rgb(raw.image)
            else:
                image = np.array(Image.open(io.BytesIO(raw.image)).convert("RGB"))
            square, mirrored = TRANSFORM(image, draws=draws)
            batch.append(Seen(raw.key, raw.label, sample, epoch, mirrored, square.tobytes()))
        steps.append(batch)
    reader.close()
    return steps


# ---- one stream


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_first_50_global_batches_are_the_same_for_all(
    manifest: Manifest, reference: list[list[Seen]], world_size: int, workers: int
):
    accumulation_steps = {0: 1, 1: 2, 3: 1}[workers]
    found = global_batches(manifest, world_size=world_size, accumulation_steps=accumulation_steps, workers=workers)
    assert found == reference


@pytest.mark.parametrize(("world_size", "accumulation_steps"), [(1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)])
def test_micro_batches_do_not_change_the_stream(
    manifest: Manifest, reference: list[list[Seen]], world_size: int, accumulation_steps: int
):
    found = global_batches(manifest, world_size=world_size, accumulation_steps=accumulation_steps)
    assert found == reference


def test_the_stream_is_what_it_is_meant_to_be(manifest: Manifest, reference: list[list[Seen]]):
    """Guards the reference: every sample once an epoch, its own label, another crop each time, half of them flipped."""
    order = make_order(manifest)
    stream = [one for step in reference for one in step]
    for epoch in range(6):
        assert sorted(one.sample for one in stream if one.epoch == epoch) == list(range(61))
    assert all(manifest.classes[one.label] == one.key.split("_")[0] for one in stream)
    assert [[one.sample for one in step] for step in reference] == [
        order.rank_batch(step, rank=0, world_size=1).sample.tolist() for step in range(STEPS)
    ]
    looks = {(one.sample, one.pixels) for one in stream}
    assert len(looks) > 0.95 * len(stream)  # the smallest images may be cropped alike twice
    assert 0.4 < np.mean([one.mirrored for one in stream]) < 0.6  # 400 of them: 4 standard deviations


def test_another_seed_is_another_stream(manifest: Manifest, reference: list[list[Seen]]):
    other = [one for batch in micro_batches(manifest, seed=SEED + 1) for one in seen(batch)]
    stream = [one for step in reference for one in step]
    assert sum(a.key == b.key for a, b in zip(stream, other, strict=True)) < 30  # 1 in 61 by chance
    # The crops are others as well, not only in another order.
    pixels = {(one.sample, one.epoch): one.pixels for one in stream}
    both = [one for one in other if (one.sample, one.epoch) in pixels]
    assert sum(pixels[one.sample, one.epoch] == one.pixels for one in both) < 0.05 * len(both)


# ---- resuming


def test_resuming_at_any_step_begins_with_that_step(manifest: Manifest, reference: list[list[Seen]]):
    for step in range(STEPS):
        first = next(micro_batches(manifest, start_step=step))
        assert seen(first) == reference[step]


@pytest.mark.parametrize(("step", "workers"), [(7, 0), (8, 0), (23, 1), (49, 0), (50, 0)])
def test_the_resumed_stream_is_the_tail(manifest: Manifest, reference: list[list[Seen]], step: int, workers: int):
    """Step 7 holds the end of epoch 0 and the beginning of epoch 1; 50 is the end."""
    assert {one.epoch for one in reference[7]} == {0, 1}
    tail = [[], *([] for _ in reference[step + 1 :])] if step < STEPS else []
    for rank in (0, 1):
        stream = micro_batches(
            manifest, rank=rank, world_size=2, accumulation_steps=2, workers=workers, start_step=step
        )
        for number, batch in enumerate(stream):
            tail[number // 2] += seen(batch)
    assert tail == reference[step:]


# ---- evaluation


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("batch_size", [1, 3, 7, 64])
def test_evaluation_counts_every_sample_once_and_ranks_make_equally_many_batches(
    manifest: Manifest, world_size: int, batch_size: int
):
    counted: list[tuple[int, str]] = []
    lengths = set()
    for rank in range(world_size):
        dataset = EvalBatches(
            manifest,
            transform=EvalTransform(SIZE),
            rank=rank,
            world_size=world_size,
            batch_size=batch_size,
        )
        batches = list(eval_loader(dataset, workers=0))
        lengths.add(len(batches))
        assert len(dataset) == len(batches)
        for batch in batches:
            assert len(batch.keys) == batch_size and not batch.mirrored.any() and not batch.epochs.any()
            samples = zip(batch.samples.tolist(), batch.keys, batch.counted.tolist(), strict=True)
            counted += [(sample, key) for sample, key, one_counts in samples if one_counts]
    keys = [key for path in manifest.shard_paths for key in open_index(path).keys]
    assert counted == list(enumerate(keys))
    assert lengths == {math.ceil(math.ceil(61 / world_size) / batch_size)}  # no batch more than the longest part needs


def test_a_rank_without_a_sample_of_its_own_pads(tmp_path: Path):
    small = pack_noise(tmp_path, count=6, samples_per_shard=2)
    counted, batches = [], []
    for rank in range(5):
        dataset = EvalBatches(small, transform=EvalTransform(SIZE), rank=rank, world_size=5, batch_size=3)
        for batch in eval_loader(dataset, workers=0):
            counted += batch.samples[batch.counted].tolist()
            batches.append(rank)
    assert counted == list(range(6)) and batches == [0, 1, 2, 3, 4]


def test_evaluation_shows_the_whole_image_and_workers_change_nothing(manifest: Manifest):
    dataset = EvalBatches(manifest, transform=EvalTransform(SIZE), rank=0, world_size=2, batch_size=4)
    alone, with_worker = ([seen(batch) for batch in eval_loader(dataset, workers=workers)] for workers in (0, 1))
    assert alone == with_worker
    reader = ShardReader(manifest)
    for one in (one for batch in alone for one in batch):
        shard, row = divmod(one.sample, 9)
        if manifest.shards[shard].num_samples == 9 and reader.read(shard, row=row).image[:2] != b"\xff\xd8":
            image = np.array(Image.open(io.BytesIO(reader.read(shard, row=row).image)))
            assert EvalTransform(SIZE)(image).tobytes() == one.pixels


# ---- what goes wrong


@pytest.fixture
def corrupted(tmp_path: Path) -> tuple[Manifest, str]:
    """A data set, and the key of the one sample in it whose bytes are spoiled after packing."""
    manifest = pack_noise(tmp_path, count=20, samples_per_shard=5)
    index = open_index(manifest.shard_paths[2])
    with open(manifest.shard_paths[2], "r+b") as stream:
        stream.seek(int(index.image_offset[3]))
        stream.write(b"\x00" * int(index.image_size[3]))
    return manifest, index.keys[3]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_corrupt_sample_is_named_without_a_traceback(corrupted: tuple[Manifest, str], workers: int):
    manifest, key = corrupted
    with pytest.raises(SampleError) as caught:
        list(micro_batches(manifest, workers=workers, stop_step=3))  # 20 samples are 2.5 batches
    message = str(caught.value)
    assert repr(key) in message and str(manifest.shard_paths[2]) in message
    assert "\n" not in message and "Traceback" not in message
    dataset = EvalBatches(manifest, transform=EvalTransform(SIZE), rank=0, world_size=1, batch_size=4)
    with pytest.raises(SampleError, match=key):
        list(eval_loader(dataset, workers=workers))


def test_what_cannot_be_opened_in_a_worker_is_named_too(tmp_path: Path):
    manifest = pack_noise(tmp_path, count=20, samples_per_shard=5)
    path = manifest.shard_paths[1]
    path.with_suffix(".idx").write_text("nonsense\n")
    with pytest.raises(SampleError, match="not a readable index") as caught:
        list(micro_batches(manifest, workers=1))
    assert "Traceback" not in str(caught.value) and str(path.with_suffix(".idx")) in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_does_not_move_the_global_random_numbers(manifest: Manifest, workers: int):
    torch.manual_seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    list(micro_batches(manifest, workers=workers, stop_step=3))
    dataset = EvalBatches(manifest, transform=EvalTransform(SIZE), rank=0, world_size=1, batch_size=30)
    list(eval_loader(dataset, workers=workers))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


ENDLESS = """
import sys, time
from pathlib import Path
from data_shards.loader import Layout, TrainBatches, train_loader
from data_shards.manifest import read_manifest
from data_shards.order import Order
from data_shards.transforms import TrainTransform

if __name__ == "__main__":
    manifest = read_manifest(Path(sys.argv[1]))
    order = Order([s.num_samples for s in manifest.shards], seed=0, lanes=4, global_batch_images=8, window_images=9)
    layout = Layout(0, 1, 8, 1)
    dataset = TrainBatches(manifest, order=order, transform=TrainTransform(8), layout=layout, seed=0)
    batches = train_loader(dataset, layout=layout, start_step=0, stop_step=10**9, workers=2)
    for number, _ in enumerate(batches):  # the name keeps the loader and its workers until the very end
        print(number, flush=True)
        if not sys.stdin.readline():
            raise RuntimeError("an exception of the rank's")
"""


@pytest.mark.parametrize("end", ["an exception", "SIGKILL"])
def test_a_jobs_signals_leave_workers_at_work_and_they_end_with_their_rank(
    manifest: Manifest, tmp_path: Path, end: str
):
    """Slurm sends SIGTERM and the like to every process of a job; the rank must be able to finish its step and save."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", tmp_path / "endless.py", manifest.root],
        env={"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin and process.stdout
    helpers: list[psutil.Process] = []
    try:
        assert process.stdout.readline() == "0\n"
        helpers = psutil.Process(process.pid).children(recursive=True)
        assert len(helpers) == 4  # the resource tracker, the fork server and its two workers
        for helper in helpers:
            for number in (15, 2, 10):  # SIGTERM, SIGINT, SIGUSR1
                helper.send_signal(number)
        time.sleep(0.5)
        for number in range(1, 40):  # more than was read ahead
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"{number}\n"
        assert all(helper.is_running() and helper.status() != psutil.STATUS_ZOMBIE for helper in helpers)
        if end == "SIGKILL":
            process.kill()
        else:
            process.stdin.close()
            assert process.wait(timeout=20) == 1
        _, alive = psutil.wait_procs(helpers, timeout=20)
        assert not alive
    finally:
        for left in (process, *helpers):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()

"""The loader's laws over random data: any shards, sets, mixtures, processes, workers, micro-batches and restarts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardvit.data_shards.images.auto_augment import AutoAugment
from shardvit.data_shards.images.color_jitter import ColorJitter
from shardvit.data_shards.images.transforms import EvalTransform, TrainTransform
from shardvit.data_shards.loading.assemble import Access
from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.loading.erasing import ErasingConfig
from shardvit.data_shards.loading.loader import EvalBatches, Layout, TrainBatches, TrainLoader, eval_batches
from shardvit.data_shards.loading.mixing import MixupConfig
from shardvit.data_shards.order.mixture import AnyOrder, make_order
from shardvit.data_shards.shards.labels import LabelSpec
from shardvit.data_shards.shards.shard_set import ShardEntry, ShardSet, ShardTable, merge_shard_sets
from shardvit.data_shards.shards.tar_index import build_index, index_path, write_index
from shardvit.data_shards.vocabulary import WorkerKind
from shardvit.pipeline.stage.pixels import model_input, targets
from tests.data_shards.external_tars import png, write_tar

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SIZE, CLASSES = 4, 5
POOL_SIZES = (1, 2, 3, 5, 8, 13, 1, 4)
SPOILT = {(3, 2), (5, 0), (5, 7)}  # tar and row of images that cannot be decoded
TRANSFORM = TrainTransform(
    SIZE,
    interpolation="random",
    auto_augment=AutoAugment("rand-m9-mstd0.5-inc1"),
    color_jitter=ColorJitter(0.3, 0.3, 0.3),
)
ERASING = ErasingConfig(0.5, "pixel", count=2)
MIXUP = MixupConfig(mixup_alpha=0.5, cutmix_alpha=1.0, mixed_share=0.8)

# A deadline measures how busy the machine is; the pool is made once, and no example changes it.
law = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> list[ShardEntry]:
    """Tars of tiny images, of which every law takes some in some order; key tTrR is in class (T + R) mod 5."""
    folder, draw = tmp_path_factory.mktemp("pool"), np.random.default_rng(3)
    entries = []
    for tar, count in enumerate(POOL_SIZES):
        members = []
        for row in range(count):
            data = png(draw.integers(0, 256, (*draw.integers(4, 9, 2), 3), dtype=np.uint8))
            members.append((f"t{tar}r{row}.png", data[: len(data) // 2] if (tar, row) in SPOILT else data))
            members.append((f"t{tar}r{row}.cls", b"%d" % ((tar + row) % CLASSES)))
        path = write_tar(folder / f"{tar}.tar", members)
        write_index(build_index(path), index_path(path))
        entries.append(ShardEntry(str(path), path.name, count, path.stat().st_size, "", None, LabelSpec()))
    return entries


# ---- what is drawn


@dataclass(frozen=True)
class Data:
    """Some of the pool's tars as one to three sets, and the law's own numbers."""

    sets: tuple[tuple[int, ...], ...]  # the tars of each
    weights: tuple[float, ...] | None
    lanes: int
    images_per_lane: int
    window_images: int
    seed: int

    @property
    def sizes(self) -> list[list[int]]:
        return [[POOL_SIZES[tar] for tar in tars] for tars in self.sets]

    @property
    def global_batch(self) -> int:
        return self.lanes * self.images_per_lane

    @property
    def samples(self) -> list[tuple[int, int, int]]:
        """Set, tar and row of every sample, in the merged set's order."""
        return [
            (number, tar, row)
            for number, tars in enumerate(self.sets)
            for tar in tars
            for row in range(POOL_SIZES[tar])
        ]

    def order(self) -> AnyOrder:
        return make_order(
            self.sizes,
            weights=self.weights,
            seed=self.seed,
            lanes=self.lanes,
            global_batch_images=self.global_batch,
            window_images=self.window_images,
        )

    def shards(self, pool: Sequence[ShardEntry]) -> ShardSet:
        return merge_shard_sets(
            [
                ShardSet(
                    name=f"set{number}",
                    source=f"set{number}",
                    split="train",
                    classes=tuple("abcde"),
                    shards=ShardTable.of_entries([pool[tar] for tar in tars]),
                    digest=f"{tars}",
                )
                for number, tars in enumerate(self.sets)
            ]
        )


@dataclass(frozen=True)
class Reading:
    """A way to read the stream from some step on, which must not matter."""

    world_size: int
    accumulation_steps: int
    workers: int = 0
    kind: WorkerKind = "thread"


@st.composite
def data(draw: st.DrawFn, *, most_sets: int = 3) -> Data:
    tars = st.lists(st.integers(0, len(POOL_SIZES) - 1), min_size=1, max_size=5, unique=True)
    sets = draw(st.lists(tars.map(tuple), min_size=1, max_size=most_sets))
    weights = st.lists(st.floats(0.1, 10), min_size=len(sets), max_size=len(sets)).map(tuple)
    fewest = min(sum(POOL_SIZES[tar] for tar in each) for each in sets)
    lanes = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if n <= fewest]))
    return Data(
        sets=tuple(sets),
        weights=draw(weights) if len(sets) > 1 and draw(st.booleans()) else None,
        lanes=lanes,
        images_per_lane=draw(st.integers(1, max(1, 12 // lanes))),
        window_images=draw(st.integers(1, 12)),
        seed=draw(st.integers(0, 2**40)),
    )


@st.composite
def readings(draw: st.DrawFn, of: Data) -> Reading:
    world_size = draw(st.sampled_from([n for n in range(1, of.lanes + 1) if of.lanes % n == 0]))
    part = of.global_batch // world_size
    accumulation_steps = draw(st.sampled_from([n for n in range(1, part + 1) if part % n == 0]))
    return Reading(world_size, accumulation_steps, workers=draw(st.sampled_from([0, 0, 1, 3])))


# ---- what is seen


@dataclass(frozen=True)
class Row:
    """Everything of a sample that training can see, and what is said of it."""

    key: str
    label: int
    sample: int
    epoch: int
    mirrored: bool
    substituted: bool
    pixels: bytes


def rows(batch: Batch, *, count: int) -> list[Row]:
    """The first `count` rows, the rank's own."""
    assert batch.counted.all() and batch.images.dtype == torch.uint8
    columns = (batch.labels, batch.samples, batch.epochs, batch.mirrored, batch.substituted, batch.images)
    return [
        Row(key, int(label), int(sample), int(epoch), bool(mirrored), bool(substituted), pixels.numpy().tobytes())
        for key, label, sample, epoch, mirrored, substituted, pixels in zip(batch.keys, *columns, strict=True)
    ][:count]


def fed(batch: Batch) -> bytes:
    """The bits of a batch that the model and the loss get."""
    cpu = torch.device("cpu")
    images = model_input(batch, device=cpu, dtype=torch.float32)
    wanted = targets(batch, device=cpu, num_classes=CLASSES, label_kind="single")
    assert len(images) == len(wanted)
    return b"".join(
        image.numpy().tobytes() + target.numpy().tobytes() for image, target in zip(images, wanted, strict=True)
    )


@dataclass
class Stream:
    """Some global batches, from what all the ranks see of them."""

    rows: list[list[Row]]
    fed: list[bytes]

    def __add__(self, other: "Stream") -> "Stream":
        return Stream(self.rows + other.rows, self.fed + other.fed)


def read(
    shards: ShardSet,
    order: AnyOrder,
    *,
    how: Reading,
    seed: int,
    steps: int,
    stop_step: int,
    start_step: int = 0,
    mixup: MixupConfig | None = None,
) -> Stream:
    """Read some steps from `start_step` on, with loaders that would continue to `stop_step`."""
    found: list[list[Row]] = [[] for _ in range(steps)]
    inputs = [b""] * steps
    rows_each = order.global_batch_images // how.world_size // how.accumulation_steps
    for rank in range(how.world_size):
        loader = TrainLoader(
            TrainBatches(
                Access(shards, on_corrupt="substitute"),
                order=order,
                transform=TRANSFORM,
                layout=Layout(rank, how.world_size, rows_each, how.accumulation_steps),
                seed=seed,
                mixup=mixup,
                erasing=ERASING,
            ),
            start_step=start_step,
            stop_step=stop_step,
            workers=how.workers,
            kind=how.kind,
        )
        for number in range(steps * how.accumulation_steps):
            batch = next(loader)
            found[number // how.accumulation_steps] += rows(batch, count=rows_each)
            inputs[number // how.accumulation_steps] += fed(batch)
        assert loader.step == start_step + steps
        loader.close()
    return Stream(found, inputs)


# ---- the laws


@law
@given(st.data())
def test_any_reading_with_any_restarts_is_the_stream_itself(pool: list[ShardEntry], draw: st.DataObject):
    """Same samples, order, labels, pixels, mixed inputs and substitutes, wherever and however often it is taken up."""
    of = draw.draw(data())
    steps = draw.draw(st.integers(1, 6))
    mixup = draw.draw(st.sampled_from([None, MIXUP]))
    shards, order = of.shards(pool), of.order()
    options: dict[str, Any] = {"seed": of.seed, "stop_step": steps, "mixup": mixup}
    reference = read(shards, order, how=Reading(1, 1), steps=steps, **options)
    found = Stream([], [])
    while len(found.rows) < steps:
        part = draw.draw(st.integers(1, steps - len(found.rows)))
        how = draw.draw(readings(of))
        # As another process would: nothing is handed over but the step.
        found += read(shards, of.order(), how=how, steps=part, start_step=len(found.rows), **options)
    assert found == reference


@law
@given(st.data())
def test_every_sample_once_in_each_epoch_of_its_set(pool: list[ShardEntry], draw: st.DataObject):
    """Nothing is lost or repeated; each damaged image has one place an epoch, which a whole one of its set takes."""
    of = draw.draw(data())
    how = draw.draw(readings(of))
    epoch_steps = -(-len(of.samples) // of.global_batch)
    stream = read(
        of.shards(pool), of.order(), how=how, seed=of.seed, steps=2 * epoch_steps + 1, stop_step=2 * epoch_steps + 1
    )
    seen = [row for step in stream.rows for row in step]
    for row in seen:  # a sample is what its number says, and never a damaged one
        _, tar, at = of.samples[row.sample]
        assert (row.key, row.label) == (f"t{tar}r{at}", (tar + at) % CLASSES) and (tar, at) not in SPOILT
    for number, sizes in enumerate(of.sizes):
        own = [row for row in seen if of.samples[row.sample][0] == number]
        spoilt = sum((tar, at) in SPOILT for each, tar, at in of.samples if each == number)
        refs = Counter((row.epoch, row.sample) for row in own if not row.substituted)
        assert not refs or max(refs.values()) == 1
        # Lanes go through their spans at their own pace: an epoch is over when the next but one has begun.
        finished = max((row.epoch for row in own), default=0) - 1
        for epoch in range(finished):
            assert sum(each == epoch for each, _ in refs) == sum(sizes) - spoilt
            assert sum(row.epoch == epoch and row.substituted for row in own) == spoilt
    if len(of.sets) == 1:  # two epochs were read
        assert {row.epoch for row in seen} >= {0, 1}
        assert len([row for row in seen if row.epoch == 0]) == len(of.samples)


@law
@given(st.data())
def test_evaluation_counts_each_whole_image_once_for_any_ranks_and_workers(pool: list[ShardEntry], draw: st.DataObject):
    of = draw.draw(data(most_sets=1))
    world_size, batch_size = draw.draw(st.integers(1, 5)), draw.draw(st.integers(1, 9))
    counted: list[tuple[int, str, int]] = []
    faults, lengths = set(), set()
    for rank in range(world_size):
        batches = EvalBatches(
            Access(of.shards(pool), on_corrupt="substitute"),
            transform=EvalTransform(SIZE),
            rank=rank,
            world_size=world_size,
            batch_size=batch_size,
        )
        own = list(eval_batches(batches, workers=draw.draw(st.sampled_from([0, 2])), kind="thread"))
        lengths.add(len(own))
        for batch in own:
            assert len(batch.images) == batch_size
            columns = zip(batch.samples.tolist(), batch.keys, batch.labels.tolist(), batch.counted, strict=True)
            counted += [(sample, key, label) for sample, key, label, counts in columns if counts]
            faults |= {fault.key for fault in batch.faults}
    whole = [(at, tar, row) for at, (_, tar, row) in enumerate(of.samples) if (tar, row) not in SPOILT]
    assert counted == [(at, f"t{tar}r{row}", (tar + row) % CLASSES) for at, tar, row in whole]
    assert faults == {f"t{tar}r{row}" for _, tar, row in of.samples if (tar, row) in SPOILT}
    longest = -(-len(of.samples) // world_size)
    assert lengths == {-(-longest // batch_size)}  # no batch more than the longest part needs


# ---- what hypothesis is too slow for, or would not come upon

MIXED = Data(
    sets=((5, 1), (4, 3, 0), (7,)), weights=(3.0, 1.5, 0.5), lanes=4, images_per_lane=2, window_images=6, seed=9
)


def test_worker_processes_read_a_mixture_alike(pool: list[ShardEntry]):
    options: dict[str, Any] = {"seed": MIXED.seed, "steps": 5, "stop_step": 5, "mixup": MIXUP}
    alone = read(MIXED.shards(pool), MIXED.order(), how=Reading(1, 1), **options)
    found = read(MIXED.shards(pool), MIXED.order(), how=Reading(1, 2, workers=2, kind="process"), **options)
    assert found == alone
    assert {MIXED.samples[row.sample][0] for step in alone.rows for row in step} == {0, 1, 2}

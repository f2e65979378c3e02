"""The stream of batches: order -> read -> decode -> transform -> `Batch`, with any number of workers.

Everything is a function of the micro-batch's number, so the stream does not depend on workers or world size, and
resuming needs a few numbers and no replay. Evaluation counts every sample exactly once. Two threads per rank prefetch
remote shards for the node. Cost: 1 to 3 ms of CPU a photograph, nearly all of it decoding; memory: see `memory`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.crops import DRAWS_PER_SAMPLE
from shardvit.data_shards.images.size_phases import SizePhase, phase_at
from shardvit.data_shards.images.transforms import EvalTransform, TrainTransform
from shardvit.data_shards.loading.assemble import Access, Assembler
from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.loading.erasing import ErasingConfig, draw_erasures
from shardvit.data_shards.loading.memory import TOGETHER
from shardvit.data_shards.loading.mixing import MixupConfig, draw_mix
from shardvit.data_shards.loading.workers import iterate
from shardvit.data_shards.order.mixture import AnyOrder, upcoming_shards
from shardvit.data_shards.order.randomness import uniforms
from shardvit.data_shards.order.sample_order import Int64s, SampleRefs, refs_in_set_order
from shardvit.data_shards.store.prefetch import Prefetcher, start_prefetch
from shardvit.data_shards.vocabulary import RandomStream, WorkerKind

# Planned together, at a ninth of the cost of 64 at a time; each worker process plans for itself.
_PLANNED_IMAGES = 1024
_TRIED_IMAGES, _TRIED_SECONDS = 64, 0.5  # to time decoding


@dataclass(frozen=True)
class Layout:
    """This process's part of each global batch, and its micro-batches."""

    rank: int
    world_size: int
    micro_batch_size: int  # images of this rank in one forward pass
    accumulation_steps: int  # micro-batches in one optimizer step


class TrainBatches:
    """Micro-batches of this rank's training stream by number; number i belongs to step i // accumulation."""

    def __init__(
        self,
        access: Access,
        *,
        order: AnyOrder,
        transform: TrainTransform,
        layout: Layout,
        seed: int,
        mixup: MixupConfig | None = None,
        erasing: ErasingConfig | None = None,
        phases: Sequence[SizePhase] = (),
    ) -> None:
        """`phases`: sides of the images by step; (): the transform's."""
        self.access, self._assembler = access, Assembler(access)
        self.order, self.layout, self.seed = order, layout, seed
        self._transform, self._mixup, self._erasing = transform, mixup, erasing
        self._phases = tuple(phases)
        self._by_phase = tuple(transform.at(phase.image_size) for phase in phases) or (transform,)
        is_mixing = draw_mix(mixup, seed=seed, step=0, image_size=transform.image_size) is not None
        self._rows = layout.micro_batch_size + is_mixing  # per micro-batch; the added one is the next slot's sample
        self._plans: dict[int, tuple[SampleRefs, NDArray[np.float64]]] = {}

    def describe(self, shard: int, *, row: int) -> str:
        return self._assembler.describe(shard, row=row)

    def __getitem__(self, number: int) -> Batch:
        """Make a micro-batch; mixing adds one row, the next slot's sample."""
        step = number // self.layout.accumulation_steps
        transform = self._by_phase[phase_at(self._phases, step=step)]
        mix = draw_mix(self._mixup, seed=self.seed, step=step, image_size=transform.image_size)
        refs, draws = self.plan(number)
        erasures = draw_erasures(self._erasing, draws, image_size=transform.image_size)
        batch = self._assembler.train(refs, order=self.order, transform=transform, draws=draws, mix=mix)
        return replace(batch, erasures=erasures) if erasures else batch

    def decode_seconds(self, number: int) -> float | None:
        """Measure CPU seconds an image on part of a micro-batch, in half a second; None if one cannot be read."""
        refs, draws = self.plan(number)
        spent, count, at_once = 0.0, 0, max(1, min(TOGETHER, self._rows // 2))
        try:
            for first in range(0, min(self._rows, _TRIED_IMAGES), at_once):
                part = slice(first, first + at_once)
                before = time.process_time()
                batch = self._assembler.train(
                    refs.part(part), order=self.order, transform=self._transform, draws=draws[part]
                )
                if first or self._rows <= at_once:  # the first part loads the decoder and opens shards
                    spent, count = spent + time.process_time() - before, count + len(batch.keys)
                if spent > _TRIED_SECONDS:
                    break
        except UserError:
            return None
        return spent / count

    def plan(self, number: int) -> tuple[SampleRefs, NDArray[np.float64]]:
        """Find a micro-batch's samples, [rows], and their random numbers, [rows, `DRAWS_PER_SAMPLE`]."""
        rows = self._rows
        batches = max(1, _PLANNED_IMAGES // rows)
        block, place = divmod(number, batches)
        plan = self._plans.get(block)
        if plan is None:
            plan = self._planned(np.arange(block * batches, (block + 1) * batches, dtype=np.int64))
            if len(self._plans) >= 4:  # workers are a few micro-batches apart
                self._plans.pop(min(self._plans), None)  # another thread may have dropped it
            self._plans[block] = plan
        refs, draws = plan
        own = slice(place * rows, (place + 1) * rows)
        return refs.part(own), draws[own]

    def _planned(self, numbers: Int64s) -> tuple[SampleRefs, NDArray[np.float64]]:
        layout, order = self.layout, self.order
        step, micro = np.divmod(numbers[:, None], layout.accumulation_steps)
        part_images = order.global_batch_images // layout.world_size
        start = layout.rank * part_images + micro * layout.micro_batch_size
        slot = (start + np.arange(self._rows, dtype=np.int64)) % order.global_batch_images
        per_lane = order.images_per_lane
        refs = order.resolve((slot // per_lane).ravel(), (step * per_lane + slot % per_lane).ravel())
        draws = uniforms(RandomStream.AUGMENT, self.seed, refs.epoch, refs.sample, draws=DRAWS_PER_SAMPLE)
        return refs, draws

    def upcoming(self, start_step: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (step, shards first touched in it) for the prefetcher."""
        layout = self.layout
        where = {"rank": layout.rank, "world_size": layout.world_size, "start_step": start_step}
        return upcoming_shards(self.order, **where, beyond=self._rows - layout.micro_batch_size)


class EvalBatches:
    """This rank's evaluation batches by number: a contiguous block of `samples` (ascending; None: all).

    Blocks are whole batches, so each batch has the same samples, and bit-identical outputs, on any number of ranks. The
    last sample, with `counted` False, pads blocks to equal length: ZeRO-3 needs equally many forward passes.
    """

    def __init__(
        self,
        access: Access,
        *,
        transform: EvalTransform,
        rank: int,
        world_size: int,
        batch_size: int,
        samples: Int64s | None = None,
    ) -> None:
        self.access, self._assembler = access, Assembler(access)
        self._transform, self._samples = transform, samples
        self._num_samples = access.shards.num_samples if samples is None else len(samples)
        self._block = -(-self._num_samples // (world_size * batch_size)) * batch_size
        self._first = rank * self._block
        self._batch_size = batch_size
        self._shard_starts = np.cumsum([0, *access.shards.shard_sizes], dtype=np.int64)[:-1]

    def __len__(self) -> int:
        """The same for every rank."""
        return self._block // self._batch_size

    def describe(self, shard: int, *, row: int) -> str:
        return self._assembler.describe(shard, row=row)

    def __getitem__(self, number: int) -> Batch:
        """Make a batch, always `batch_size` long so that compiled shapes stay the same."""
        refs, counted = self._refs(number)
        return self._assembler.evaluate(refs, counted=counted, transform=self._transform)

    def upcoming(self) -> Iterator[tuple[int, list[int]]]:
        """Yield (batch, shards first touched in it) for the prefetcher."""
        last = -1
        for number in range(len(self)):
            shards = [shard for shard in np.unique(self._refs(number)[0].shard).tolist() if shard > last]
            last = max([last, *shards])
            yield number, shards

    def _refs(self, number: int) -> tuple[SampleRefs, NDArray[np.bool_]]:
        in_block = np.arange(number * self._batch_size, (number + 1) * self._batch_size, dtype=np.int64)
        wanted = self._first + in_block
        counted = wanted < self._num_samples
        sample = np.minimum(wanted, self._num_samples - 1)
        if self._samples is not None:
            sample = self._samples[sample]
        return refs_in_set_order(sample, shard_starts=self._shard_starts), counted


class TrainLoader:
    """Iterate over the micro-batches of steps [start_step, stop_step), except `passed_over`.

    Its position is one number, `step`, whatever the number of processes. With 0 `workers` the calling thread reads and
    decodes. Iteration raises UserError for an unreadable sample, and WorkerDied, which names the sample.
    """

    def __init__(
        self,
        batches: TrainBatches,
        *,
        stop_step: int,
        start_step: int = 0,
        passed_over: Collection[int] = (),
        workers: int = 0,
        kind: WorkerKind = "process",
    ) -> None:
        self._batches, self._stop_step, self._passed_over = batches, stop_step, frozenset(passed_over)
        self._workers = workers
        self._kind: WorkerKind = kind
        self._delivered = start_step * batches.layout.accumulation_steps
        self._coming: Iterator[int] = iter(())
        self._iterator: Generator[Batch] | None = None
        self._prefetcher: Prefetcher | None = None

    def __iter__(self) -> TrainLoader:
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            self._start()
        assert self._iterator is not None
        batch = next(self._iterator)
        self._delivered = next(self._coming) + 1
        if self._prefetcher is not None:
            self._prefetcher.reached(self.step)
        return batch

    @property
    def step(self) -> int:
        """Count the optimizer steps whose micro-batches have all been handed out."""
        return self._delivered // self._batches.layout.accumulation_steps

    def close(self) -> None:
        """Stop workers and downloads; the loader can be used again."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        if self._iterator is not None:
            self._iterator.close()
        self._iterator = self._prefetcher = None

    def _start(self) -> None:
        access, upcoming = self._batches.access, self._batches.upcoming(self.step)
        self._prefetcher = start_prefetch(access.store, access.shards, upcoming=upcoming)
        accumulation = self._batches.layout.accumulation_steps
        numbers: Sequence[int] = range(self._delivered, self._stop_step * accumulation)
        if self._passed_over:
            numbers = [number for number in numbers if number // accumulation not in self._passed_over]
        self._coming = iter(numbers)
        self._iterator = iterate(self._batches, numbers=numbers, workers=self._workers, kind=self._kind)


def eval_batches(
    batches: EvalBatches, *, workers: int, kind: WorkerKind = "process", first: int = 0
) -> Generator[Batch]:
    """Yield the evaluation batches from number `first` on; raises as `TrainLoader` does."""
    upcoming = ((number, shards) for number, shards in batches.upcoming() if number >= first)
    prefetcher = start_prefetch(batches.access.store, batches.access.shards, upcoming=upcoming)
    try:
        items = iterate(batches, numbers=range(first, len(batches)), workers=workers, kind=kind)
        for number, batch in enumerate(items, start=first):
            yield batch
            if prefetcher is not None:
                prefetcher.reached(number + 1)
    finally:
        if prefetcher is not None:
            prefetcher.close()

"""Find the sample at any position of the stream, by a pure function without I/O.

An epoch is a permutation of all samples. The shards are permuted and laid end to end, which gives every sample a place
0..N-1; the places are cut into `lanes` equal spans, and each lane is shuffled within windows. Global batch s takes the
places [s*c, (s+1)*c) of every lane's stream, in lane order, where c = global batch / lanes. A rank owns whole lanes and
so reads few shards. The position in training is one number, the images seen.

No remainder is dropped or repeated. A lane's stream is its span of epoch 0, then of epoch 1, and so on. Where `lanes`
does not divide N, the lanes take turns with a span longer by one sample: after e epochs lane l has been given
floor((e*N + l) / lanes) samples, which sums to exactly e*N over the lanes (Hermite's identity). So each sample comes
exactly once an epoch; only the batch on the boundary may mix samples of two epochs.

Cost: constant time a sample; 16 bytes a shard for each epoch in use (measured with 10^9 samples in 10^5 shards). Every
product is at most the number of images seen, so 64-bit integers last for `MOST_IMAGES`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.order.randomness import hash_words, permute
from shardvit.data_shards.vocabulary import RandomStream

Int64s = NDArray[np.int64]

MOST_IMAGES = 2**62  # a stream's end; sums of two such numbers still fit into 64 bits


@dataclass(frozen=True)
class SampleRefs:
    """Samples at some positions of the stream; all arrays have shape [n]."""

    epoch: Int64s  # from 0; with repeats each of them counts: see `repeats`
    shard: Int64s  # number in the manifest
    row: Int64s  # number in the shard
    sample: Int64s  # number in the manifest, over all shards
    lane: Int64s  # where in the stream: this lane ...
    position: Int64s  # ... and this position in its stream

    def part(self, slots: slice) -> SampleRefs:
        return SampleRefs(**{each.name: getattr(self, each.name)[slots] for each in fields(self)})


def refs_in_set_order(samples: Int64s, *, shard_starts: Int64s) -> SampleRefs:
    """Refer to samples by number, as evaluation does; `shard_starts` has the number of each shard's first sample."""
    shard, zeros = np.searchsorted(shard_starts, samples, side="right") - 1, np.zeros_like(samples)
    row = samples - shard_starts[shard]
    return SampleRefs(epoch=zeros, shard=shard, row=row, sample=samples, lane=zeros, position=samples)


class LaneStream(ABC):
    """A stream of samples in lanes: the world size must divide `lanes`, and these `global_batch_images`."""

    repeats: int = 1  # showings of a sample in an epoch, which `SampleRefs.epoch` counts

    def __init__(self, num_samples: int, *, num_shards: int, lanes: int, global_batch_images: int) -> None:
        self.num_samples, self.num_shards = num_samples, num_shards
        self.lanes, self.global_batch_images = lanes, global_batch_images
        self.images_per_lane = global_batch_images // lanes

    @abstractmethod
    def resolve(self, lane: Int64s, position: Int64s, *, attempt: int = 0) -> SampleRefs:
        """Resolve positions of lanes' streams; `lane` and `position` have shape [n], in any order.

        Positions count from 0, up to `MOST_IMAGES` over all lanes. `attempt` above 0 resolves to substitutes.
        """

    def substitute(self, refs: SampleRefs, *, attempt: int) -> SampleRefs:
        """Replace damaged samples, keeping epochs, lanes and positions; `attempt` counts from 1.

        A hash of (seed, epoch, sample) and `attempt` picks from the place's window, so that the rank has the shard
        open; from the whole lane if the window has one place, from the whole epoch if the lane has one. It never picks
        the damaged sample if there is another, nor repeats one before all were tried.
        """
        assert attempt >= 1, "attempt 0 is the sample itself"
        return self.resolve(refs.lane, refs.position, attempt=attempt)

    def rank_batch(
        self, step: int, *, rank: int, world_size: int, start: int = 0, stop: int | None = None
    ) -> SampleRefs:
        """Return one rank's samples of global batch `step`, in lane order; `start` and `stop` select a micro-batch.

        The ranks' parts, concatenated, are the global batch. UserError for a world size that does not fit.
        """
        check_world_size(self.lanes, world_size=world_size)
        own_lanes = self.lanes // world_size
        part_images = own_lanes * self.images_per_lane
        stop = part_images if stop is None else stop
        assert 0 <= rank < world_size and 0 <= start <= stop <= part_images, "a slice of somebody else's part"
        in_part = np.arange(start, stop, dtype=np.int64)
        lane = rank * own_lanes + in_part // self.images_per_lane
        return self.resolve(lane, step * self.images_per_lane + in_part % self.images_per_lane)


class Order(LaneStream):
    """The order of a stream over one data set; UserError for sizes that do not fit, naming those that do.

    `shard_sizes`: samples of each shard; `window_images`: places of a lane shuffled together; `holder`: for messages.
    """

    def __init__(
        self,
        shard_sizes: Sequence[int],
        *,
        seed: int,
        lanes: int,
        global_batch_images: int,
        window_images: int,
        holder: str = "the shards hold",
    ) -> None:
        self._sizes = np.asarray(shard_sizes, dtype=np.int64)
        num_samples = int(self._sizes.sum())
        cut = {"lanes": lanes, "global_batch_images": global_batch_images}
        check_sizes(num_samples, **cut, window_images=window_images, holder=holder)
        super().__init__(num_samples, num_shards=len(self._sizes), **cut)
        self.seed = seed
        self._window_images = window_images
        self._first_sample = np.cumsum(self._sizes) - self._sizes
        self._layouts: dict[int, tuple[Int64s, Int64s]] = {}

    def resolve(self, lane: Int64s, position: Int64s, *, attempt: int = 0) -> SampleRefs:
        assert int(position.max(initial=0)) * self.lanes < MOST_IMAGES, "more images than 64-bit integers count"
        # The last epoch e that lane l has reached, floor((e*N + l) / lanes) <= position.
        epoch = (position * self.lanes + self.lanes - 1 - lane) // self.num_samples
        offset = position - self._given(lane, epoch)
        span = self._given(lane, epoch + 1) - self._given(lane, epoch)
        first = self._given_below(lane, epoch + 1) - self._given_below(lane, epoch)

        window = offset // self._window_images
        window_first = window * self._window_images
        window_size = np.minimum(span - window_first, self._window_images)
        key = hash_words(RandomStream.WINDOW_SHUFFLE, self.seed, epoch, lane, window)
        place = first + window_first + permute(offset - window_first, size=window_size, key=key)
        shard, row = self._laid(epoch, place)
        if attempt:
            # Draw the substitute from the window, the lane's span or the epoch.
            narrow, lonely = window_size == 1, span == 1
            low = np.where(lonely, 0, first + np.where(narrow, 0, window_first))
            size = np.where(lonely, self.num_samples, np.where(narrow, span, window_size))
            key = hash_words(RandomStream.SUBSTITUTE, self.seed, epoch, self._first_sample[shard] + row)
            shard, row = self._laid(epoch, _another(place, low=low, size=size, key=key, attempt=attempt))
        sample = self._first_sample[shard] + row
        return SampleRefs(epoch=epoch, shard=shard, row=row, sample=sample, lane=lane, position=position)

    def _given(self, lane: Int64s, epoch: Int64s) -> Int64s:
        """Count the samples given to the lane after `epoch` epochs."""
        return (epoch * self.num_samples + lane) // self.lanes

    def _given_below(self, lane: Int64s, epoch: Int64s) -> Int64s:
        """Sum `_given` over the lanes 0..lane - 1, in closed form."""
        each, rest = np.divmod(epoch * self.num_samples, self.lanes)
        return each * lane + np.maximum(rest + lane - self.lanes, 0)

    def _laid(self, epoch: Int64s, place: Int64s) -> tuple[Int64s, Int64s]:
        shard, row = np.empty_like(place), np.empty_like(place)
        for one_epoch in sorted(set(epoch.tolist())):  # numpy's `unique` imports masked arrays, in 0.05 s
            here = epoch == one_epoch
            permuted_shards, first_place = self._epoch_layout(one_epoch)
            laid = np.searchsorted(first_place, place[here], side="right") - 1
            shard[here], row[here] = permuted_shards[laid], place[here] - first_place[laid]
        return shard, row

    def _epoch_layout(self, epoch: int) -> tuple[Int64s, Int64s]:
        """Return an epoch's order of shards and the place where each starts; the last few are cached."""
        if (known := self._layouts.get(epoch)) is not None:
            return known
        shards = np.arange(len(self._sizes), dtype=np.uint64)
        drawn = hash_words(RandomStream.SHARD_ORDER, self.seed, epoch, shards)
        permuted = np.argsort(drawn, kind="stable").astype(np.int64)
        sizes = self._sizes[permuted]
        if len(self._layouts) >= 4:  # a batch spans at most two epochs, unless an epoch is shorter than a batch
            self._layouts.pop(min(self._layouts), None)  # another thread may have dropped it
        self._layouts[epoch] = layout = permuted, np.cumsum(sizes) - sizes
        return layout


def _another(place: Int64s, *, low: Int64s, size: Int64s, key: NDArray[np.uint64], attempt: int) -> Int64s:
    """Take entry `attempt` of a keyed permutation of the places [low, low + size) without `place`."""
    others = np.maximum(size - 1, 1)
    skip = permute((attempt - 1) % others, size=others, key=key) + 1
    return low + (place - low + skip) % size


def check_sizes(
    num_samples: int, *, lanes: int, global_batch_images: int, window_images: int, holder: str = "the shards hold"
) -> None:
    """UserError for sizes that do not fit an `Order`, naming the recipe's key and what to change."""
    if lanes < 1 or global_batch_images < 1 or window_images < 1:
        raise UserError("data.lanes, global_batch_size and data.shuffle_window_images must each be 1 or more")
    if lanes > num_samples:
        fitting = max((n for n in range(1, num_samples + 1) if global_batch_images % n == 0), default=None)
        raise UserError(
            f"data.lanes is {lanes}, but {holder} only {num_samples} images: "
            + (f"set data.lanes to {fitting}, or to a smaller divisor of the global batch" if fitting else "pack some")
        )
    if global_batch_images % lanes:
        raise UserError(
            f"global_batch_size {global_batch_images} is not a multiple of data.lanes {lanes}: every lane gives the "
            f"same number of images to each batch; the nearest batch sizes that fit are "
            f"{_nearest(global_batch_images, multiple_of=lanes)}"
        )


def check_world_size(lanes: int, *, world_size: int) -> None:
    """UserError unless `world_size` divides the lanes, naming world sizes that do."""
    if world_size < 1 or lanes % world_size:
        fitting = ", ".join(str(n) for n in range(1, lanes + 1) if lanes % n == 0)
        raise UserError(
            f"{world_size} processes cannot share data.lanes {lanes} evenly: use one of {fitting} processes, "
            f"or a number of lanes that {world_size} divides"
        )


def _nearest(value: int, *, multiple_of: int) -> str:
    below, above = value // multiple_of * multiple_of, -(-value // multiple_of) * multiple_of
    return f"{below} and {above}" if below else str(above)

"""Which sample stands at which position of the stream: a pure function, the heart of the project.

The law. An epoch is a permutation of all samples. The shards are permuted and laid end to end, which gives every
sample of the epoch a place 0..N-1; the places are cut into `lanes` equal spans, and each lane is shuffled inside
windows of a fixed number of places. Global batch s takes the places [s*c, (s+1)*c) of every lane's stream, in lane
order, where c = global batch / lanes. A rank owns whole lanes and so reads few shards. The position in training is
one number, the images seen; everything else follows from it, for any number of processes and workers.

No remainder is dropped or repeated. A lane's stream is the lane's span of epoch 0, then of epoch 1, and so on without
a gap. Where `lanes` does not divide N the spans differ by one sample, and the lanes take turns with the longer one:
after e epochs lane l has been given floor((e*N + l) / lanes) samples, which sums to exactly e*N over the lanes
(Hermite's identity). So each sample is visited exactly once an epoch, and the only trace of an epoch's end is that
the batch on the boundary may hold the last samples of one epoch and the first of the next.

Cost: constant time and memory a sample; per epoch in use one permutation of the shards (16 bytes a shard). Nothing
grows with the number of samples. No I/O here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_shards.errors import UserError
from data_shards.randomness import hash_words, permute

Int64s = NDArray[np.int64]

# What a key is for, so that no two uses of one seed ever share their random numbers.
_SHARD_ORDER, _WINDOW_SHUFFLE = 1, 2


@dataclass(frozen=True)
class Visits:
    """Some positions of the stream, resolved; all arrays have shape [n]."""

    epoch: Int64s  # counted from 0
    shard: Int64s  # number of the shard in the manifest
    row: Int64s  # number of the sample in its shard
    sample: Int64s  # number of the sample in the manifest: the shards' samples counted through


class Order:
    """The order of one training stream.

    Args:
        shard_sizes: samples of each shard, in the order of the manifest.
        seed: another seed is another order.
        lanes: spans an epoch is cut into; every usable number of processes divides it.
        global_batch_images: samples of one optimizer step, over all processes; a multiple of `lanes`.
        window_images: places of a lane that are shuffled among themselves (a lane's span at the most).

    Raises:
        UserError: sizes that do not fit together; the sentence names the key and values that do fit.
    """

    def __init__(
        self,
        shard_sizes: Sequence[int],
        *,
        seed: int,
        lanes: int,
        global_batch_images: int,
        window_images: int,
    ) -> None:
        check_sizes(
            sum(shard_sizes),
            lanes=lanes,
            global_batch_images=global_batch_images,
            window_images=window_images,
        )
        self.num_samples = int(sum(shard_sizes))
        self.seed = seed
        self.lanes = lanes
        self.global_batch_images = global_batch_images
        self.images_per_lane = global_batch_images // lanes
        self._window_images = window_images
        self._sizes = np.asarray(shard_sizes, dtype=np.int64)
        self._first_sample = np.concatenate([[0], np.cumsum(self._sizes)[:-1]])
        self._layouts: dict[int, tuple[Int64s, Int64s]] = {}

    def rank_batch(self, step: int, *, rank: int, world_size: int, start: int = 0, stop: int | None = None) -> Visits:
        """The visits of one rank in global batch `step`: its lanes' samples, in lane order.

        The ranks' parts, one after another, are the global batch, for every `world_size` that divides the lanes.

        Args:
            step: number of the optimizer step, from 0.
            rank: which part.
            world_size: how many parts.
            start: with `stop`, the slice of the rank's part that is wanted (one micro-batch).
            stop: its end; the whole part when left out.
        """
        check_world_size(self.lanes, world_size=world_size)
        own_lanes = self.lanes // world_size
        part_images = own_lanes * self.images_per_lane
        stop = part_images if stop is None else stop
        assert 0 <= rank < world_size and 0 <= start <= stop <= part_images, "a slice of somebody else's part"
        in_part = np.arange(start, stop, dtype=np.int64)
        lane = rank * own_lanes + in_part // self.images_per_lane
        return self.visits(lane, step * self.images_per_lane + in_part % self.images_per_lane)

    def visits(self, lane: Int64s, position: Int64s) -> Visits:
        """Resolve positions of lanes' streams; `lane` and `position` have shape [n], in any order."""
        # The last epoch e that lane l has reached, floor((e*N + l) / lanes) <= position.
        epoch = (position * self.lanes + self.lanes - 1 - lane) // self.num_samples
        offset = position - self._given(lane, epoch)

        place = np.empty_like(offset)
        shard, row = np.empty_like(offset), np.empty_like(offset)
        for one_epoch in np.unique(epoch):
            here = epoch == one_epoch
            place[here] = self._shuffled_place(lane[here], offset[here], epoch=int(one_epoch))
            permuted_shards, first_place = self._epoch_layout(int(one_epoch))
            laid = np.searchsorted(first_place, place[here], side="right") - 1
            shard[here], row[here] = permuted_shards[laid], place[here] - first_place[laid]
        return Visits(epoch=epoch, shard=shard, row=row, sample=self._first_sample[shard] + row)

    def _given(self, lane: Int64s, epoch: Int64s) -> Int64s:
        """Samples lane `lane` has been given when `epoch` epochs are over."""
        return (epoch * self.num_samples + lane) // self.lanes

    def _shuffled_place(self, lane: Int64s, offset: Int64s, *, epoch: int) -> Int64s:
        """The place in the epoch where the `offset`-th visit of a lane falls."""
        epochs = np.full_like(lane, epoch)
        span = self._given(lane, epochs + 1) - self._given(lane, epochs)
        # Lane spans lie end to end: lane l begins after the spans of lanes 0..l-1. A lane's span is the common
        # floor plus 0 or 1, so count the longer ones below it.
        all_lanes = np.arange(self.lanes, dtype=np.int64)
        all_epochs = np.full_like(all_lanes, epoch)
        spans = self._given(all_lanes, all_epochs + 1) - self._given(all_lanes, all_epochs)
        first = (np.cumsum(spans) - spans)[lane]

        window = offset // self._window_images
        window_first = window * self._window_images
        window_size = np.minimum(span - window_first, self._window_images)
        key = hash_words(_WINDOW_SHUFFLE, self.seed, epoch, lane, window)
        return first + window_first + permute(offset - window_first, size=window_size, key=key)

    def _epoch_layout(self, epoch: int) -> tuple[Int64s, Int64s]:
        """The shards in this epoch's order, and the place at which each begins; the last few epochs are kept."""
        if epoch in self._layouts:
            return self._layouts[epoch]
        shards = np.arange(len(self._sizes), dtype=np.uint64)
        permuted = np.argsort(hash_words(_SHARD_ORDER, self.seed, epoch, shards), kind="stable").astype(np.int64)
        sizes = self._sizes[permuted]
        if len(self._layouts) == 4:  # a batch spans two epochs at the most, unless an epoch is shorter than a batch
            del self._layouts[min(self._layouts)]
        self._layouts[epoch] = permuted, np.cumsum(sizes) - sizes
        return self._layouts[epoch]


def check_sizes(num_samples: int, *, lanes: int, global_batch_images: int, window_images: int) -> None:
    """Refuse sizes that the law cannot hold for; see `Order` for the arguments.

    Raises:
        UserError: naming the recipe's key and what to change.
    """
    if lanes < 1 or global_batch_images < 1 or window_images < 1:
        raise UserError("data.lanes, global_batch_size and data.shuffle_window_images must each be 1 or more")
    if lanes > num_samples:
        fitting = max((n for n in range(1, num_samples + 1) if global_batch_images % n == 0), default=None)
        raise UserError(
            f"data.lanes is {lanes}, but the shards hold only {num_samples} images: "
            + (f"set data.lanes to {fitting}, or to a smaller divisor of the global batch" if fitting else "pack some")
        )
    if global_batch_images % lanes:
        raise UserError(
            f"global_batch_size {global_batch_images} is not a multiple of data.lanes {lanes}: every lane gives the "
            f"same number of images to each batch; the nearest batch sizes that fit are "
            f"{_nearest(global_batch_images, multiple_of=lanes)}"
        )


def check_world_size(lanes: int, *, world_size: int) -> None:
    """Refuse a number of processes that does not divide the lanes.

    Raises:
        UserError: naming the numbers of processes that do.
    """
    if world_size < 1 or lanes % world_size:
        fitting = ", ".join(str(n) for n in range(1, lanes + 1) if lanes % n == 0)
        raise UserError(
            f"{world_size} processes cannot share data.lanes {lanes} evenly: use one of {fitting} processes, "
            f"or a number of lanes that {world_size} divides"
        )


def _nearest(value: int, *, multiple_of: int) -> str:
    below, above = value // multiple_of * multiple_of, -(-value // multiple_of) * multiple_of
    return f"{below} and {above}" if below else str(above)

"""Mix several data sets by weight into one stream, as exact and elastic as one, and say what a rank reads next.

Every data set has its own `Order`, with the same lanes. A fixed pattern of `PATTERN` positions gives each position to a
set: set k holds quota_k of them, its weight rounded by largest remainder (to 1 in 100,000; at least 1 position). Slot i
of global batch s belongs to set pattern[(s*c + i) mod PATTERN], where c = global batch / lanes; so lane l starts l*c
positions into the pattern. The n-th position that a lane gives to set k is position n of that lane in the set's own
order, so each sample is visited exactly once in each of its set's epochs. Lookup tables resolve any position in
constant time. Unlike for a single data set, another global batch size is another stream.

The pattern is stratified: one position of set k falls at random into each of quota_k equal spans. In a prefix of it,
set k is off by less than 1 + w_k * (sets - 2) positions; in any contiguous run, such as a batch or a lane's stream, by
less than twice that. Neighbours are random, so that mixup does not always pair the same sets. Memory: 1.6 MB.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.order.randomness import hash_words, uniforms
from shardvit.data_shards.order.repeats import RepeatedOrder, images_below
from shardvit.data_shards.order.sample_order import Int64s, LaneStream, Order, SampleRefs
from shardvit.data_shards.vocabulary import RandomStream

PATTERN = 100_000  # positions until the pattern repeats: weights are rounded to multiples of 1 / PATTERN
MOST_SETS = 256  # so that rounding up small weights to 1 position never uses up a large one


class MixedOrder(LaneStream):
    """The order of one training stream over several data sets; UserError for weights that do not fit.

    Shards and samples are numbered consecutively across the sets. Epochs are those of the sample's own set. `weights`
    are the sets' shares in any unit; None: their numbers of samples.
    """

    def __init__(self, orders: Sequence[Order], *, weights: Sequence[float] | None, seed: int) -> None:
        samples, shards = [each.num_samples for each in orders], [each.num_shards for each in orders]
        cut = {"lanes": orders[0].lanes, "global_batch_images": orders[0].global_batch_images}
        super().__init__(sum(samples), num_shards=sum(shards), **cut)
        self.orders = tuple(orders)
        self.quotas = pattern_quotas(samples, weights=weights)
        self._first_sample = np.cumsum([0, *samples], dtype=np.int64)
        self._first_shard = np.cumsum([0, *shards], dtype=np.int64)
        self._pattern = _pattern(self.quotas, seed=seed)
        # For each position of the pattern: how many before it belong to the same set.
        # For each set and lane: how many of the set's positions come before the lane's first.
        self._earlier = np.empty(PATTERN, dtype=np.int64)
        self._before_lane = np.empty((len(orders), self.lanes), dtype=np.int64)
        rounds, start = np.divmod(np.arange(self.lanes, dtype=np.int64) * self.images_per_lane, PATTERN)
        for number, quota in enumerate(self.quotas):
            own = np.flatnonzero(self._pattern == number)
            self._earlier[own] = np.arange(quota)
            self._before_lane[number] = rounds * quota + np.searchsorted(own, start)

    def resolve(self, lane: Int64s, position: Int64s, *, attempt: int = 0) -> SampleRefs:
        """See `LaneStream.resolve`; substitutes come from the same data set."""
        rounds, at = np.divmod(position + lane * self.images_per_lane, PATTERN)
        component = self._pattern[at]
        own_position = rounds * self.quotas[component] + self._earlier[at] - self._before_lane[component, lane]
        epoch, shard, row, sample = (np.empty_like(position) for _ in range(4))
        for number in np.unique(component):
            here = component == number
            own = self.orders[number].resolve(lane[here], own_position[here], attempt=attempt)
            epoch[here], row[here] = own.epoch, own.row
            shard[here] = self._first_shard[number] + own.shard
            sample[here] = self._first_sample[number] + own.sample
        return SampleRefs(epoch=epoch, shard=shard, row=row, sample=sample, lane=lane, position=position)


AnyOrder = Order | MixedOrder | RepeatedOrder


def make_order(
    component_sizes: Sequence[Sequence[int]],
    *,
    weights: Sequence[float] | None,
    seed: int,
    lanes: int,
    global_batch_images: int,
    window_images: int,
    repeats: int = 1,
) -> AnyOrder:
    """Order one data set or several; `component_sizes`: samples of each shard of each set. See `Order`."""
    is_mixed, whole_batch = len(component_sizes) > 1, global_batch_images
    if repeats > 1:
        global_batch_images = images_below(whole_batch, lanes=lanes, repeats=repeats)
    orders = [
        Order(
            sizes,
            seed=set_seed(seed, number=number),
            lanes=lanes,
            global_batch_images=global_batch_images,
            window_images=window_images,
            holder=f"data set {number + 1} of the mixture holds" if is_mixed else "the shards hold",
        )
        for number, sizes in enumerate(component_sizes)
    ]
    order = MixedOrder(orders, weights=weights, seed=seed) if is_mixed else orders[0]
    return RepeatedOrder(order, repeats=repeats, global_batch_images=whole_batch) if repeats > 1 else order


def upcoming_shards(
    order: LaneStream, *, rank: int, world_size: int, start_step: int, beyond: int = 0
) -> Iterator[tuple[int, list[int]]]:
    """Yield (step, shards that the rank first touches in an epoch) for each step from `start_step`, without end.

    Shards come in order of need; `beyond` slots of the next rank's part are included. UserError as in `rank_batch`.
    """
    last_epoch = np.full(order.num_shards, -1, dtype=np.int64)
    for step in count(start_step):
        refs = order.rank_batch(step, rank=rank, world_size=world_size)
        shard, epoch = refs.shard, refs.epoch
        if beyond:
            more = order.rank_batch(step, rank=(rank + 1) % world_size, world_size=world_size, start=0, stop=beyond)
            shard, epoch = np.concatenate([shard, more.shard]), np.concatenate([epoch, more.epoch])
        epoch = epoch // order.repeats
        new = shard[epoch > last_epoch[shard]]
        np.maximum.at(last_epoch, shard, epoch)
        yield step, list(dict.fromkeys(new.tolist()))


def pattern_quotas(samples: Sequence[int], *, weights: Sequence[float] | None) -> Int64s:
    """Round weights (default: samples) by largest remainder to positions of the pattern: int64 [sets]."""
    if len(samples) > MOST_SETS:
        raise UserError(f"{len(samples)} data sets are mixed, at most {MOST_SETS} can be: pack some of them together")
    weights = samples if weights is None else weights
    if len(weights) != len(samples):
        raise UserError(
            f"{len(weights)} of {len(samples)} mixed data sets have a weight: give one to each of them, "
            "or to none (then each has a share proportional to its images)"
        )
    for number, weight in enumerate(weights, start=1):
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(f"the weight of data set {number} of the mixture is {weight}: make it a number above 0")
    exact = np.array(weights, dtype=np.float64) / math.fsum(weights) * PATTERN
    quotas = np.maximum(np.floor(exact).astype(np.int64), 1)
    missing = PATTERN - int(quotas.sum())
    if missing > 0:
        quotas[np.argsort(quotas - exact, kind="stable")[:missing]] += 1
    else:  # small weights were rounded up
        quotas[np.argmax(quotas)] += missing
    return quotas


def _pattern(quotas: Int64s, *, seed: int) -> Int64s:
    """Draw the set of each position, [PATTERN]: set k once at random in each of quota_k equal spans."""
    times = [
        (np.arange(quota) + uniforms(RandomStream.PATTERN_TIMES, seed, number, draws=int(quota))[0]) / quota
        for number, quota in enumerate(quotas)
    ]
    sets = np.repeat(np.arange(len(quotas), dtype=np.int64), quotas)
    return sets[np.argsort(np.concatenate(times), kind="stable")]


def set_seed(seed: int, *, number: int) -> int:
    """Derive a set's seed; the first set keeps the seed itself, so that a mixture of one is that set's order."""
    return seed if number == 0 else int(hash_words(RandomStream.SET_SEED, seed, number)[0])

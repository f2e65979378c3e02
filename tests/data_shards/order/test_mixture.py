"""Mixtures: each set exact in itself, shares kept everywhere, the same stream for any layout; what is read next."""

import itertools
from dataclasses import dataclass, fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.order.mixture import (
    MOST_SETS,
    PATTERN,
    MixedOrder,
    make_order,
    pattern_quotas,
    set_seed,
    upcoming_shards,
)
from shardvit.data_shards.order.sample_order import LaneStream, Order, SampleRefs

law = settings(max_examples=40, deadline=None)  # a deadline measures how busy the machine is


def mixed(sizes: list[list[int]], *, weights: list[float] | None, seed: int, **cut: int) -> MixedOrder:
    """Also of a single set."""
    orders = [Order(each, seed=set_seed(seed, number=number), **cut) for number, each in enumerate(sizes)]
    return MixedOrder(orders, weights=weights, seed=seed)


@dataclass(frozen=True)
class Case:
    sizes: list[list[int]]
    weights: list[float] | None
    seed: int
    lanes: int
    images_per_lane: int
    window_images: int

    def order(self) -> MixedOrder:
        return mixed(
            self.sizes,
            weights=self.weights,
            seed=self.seed,
            lanes=self.lanes,
            global_batch_images=self.lanes * self.images_per_lane,
            window_images=self.window_images,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """One to four sets of a few shards, empty ones too, whose weights differ by a factor of 100 at the most."""
    shards = st.lists(st.integers(0, 13), min_size=1, max_size=5).filter(any)
    sizes = draw(st.lists(shards, min_size=1, max_size=4))
    weights = st.lists(st.floats(0.05, 5), min_size=len(sizes), max_size=len(sizes))
    return Case(
        sizes=sizes,
        weights=draw(st.none() | weights),
        seed=draw(st.integers(0, 2**32)),
        lanes=draw(st.integers(1, min(8, *(sum(each) for each in sizes)))),
        images_per_lane=draw(st.integers(1, 7)),
        window_images=draw(st.integers(1, 20)),
    )


def rows(refs: SampleRefs) -> list[tuple[int, ...]]:
    return list(zip(*(getattr(refs, each.name).tolist() for each in fields(SampleRefs)), strict=True))


def batch(order: LaneStream, step: int) -> SampleRefs:
    return order.rank_batch(step, rank=0, world_size=1)


def set_of(case: Case, shard: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(len(case.sizes)), [len(each) for each in case.sizes])[shard]


def lane_visits(order: LaneStream, lane: int, *, start: int, stop: int) -> SampleRefs:
    position = np.arange(start, stop)
    return order.resolve(np.full_like(position, lane), position)


def most_off(case: Case, order: MixedOrder) -> np.ndarray:
    """Bound the error of each set's count in a run of the pattern, by the law in the docstring."""
    return 2 * (1 + order.quotas / PATTERN * (len(case.sizes) - 2))


# ---- each set's own order


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(0.01, 5), min_size=3, max_size=3), st.integers(1, 40_000), st.integers(0, 10**12))
def test_a_lane_takes_each_sets_own_order_without_a_gap(weights: list[float], images_per_lane: int, far: int):
    """A set's samples are n, n + 1, ... of its own order: from the start, across the pattern's end and far away."""
    case = Case([[4000, 2000], [30_000], [7000, 5000, 1]], weights, 3, 8, images_per_lane, window_images=50)
    order = case.order()
    pattern = set_of(case, lane_visits(order, 0, start=0, stop=PATTERN).shard)  # lane 0 begins where the pattern does
    first_sample = np.cumsum([0, *map(sum, case.sizes)])
    for lane in (0, order.lanes - 1):
        for start in (0, PATTERN - 100, far):
            refs = lane_visits(order, lane, start=start, stop=start + 200)
            which = set_of(case, refs.shard)
            shift = lane * order.images_per_lane
            assert which.tolist() == pattern[(shift + start + np.arange(200)) % PATTERN].tolist()
            for number, own_order in enumerate(order.orders):
                ours = pattern == number

                def before(at: int, ours: np.ndarray = ours) -> int:  # of this set in the first `at` positions
                    return at // PATTERN * int(ours.sum()) + int(ours[: at % PATTERN].sum())

                begin = before(start + shift) - before(shift)
                own = lane_visits(own_order, lane, start=begin, stop=begin + int((which == number).sum()))
                assert (own.sample + first_sample[number]).tolist() == refs.sample[which == number].tolist()
                assert own.epoch.tolist() == refs.epoch[which == number].tolist()
                own, theirs = (each.substitute(of, attempt=2) for each, of in ((own_order, own), (order, refs)))
                assert (own.sample + first_sample[number]).tolist() == theirs.sample[which == number].tolist()


@law
@given(cases())
def test_a_mixture_of_one_is_the_order_itself(case: Case):
    one = Case(case.sizes[:1], None, case.seed, case.lanes, case.images_per_lane, case.window_images)
    mixed = one.order()
    plain = make_order(
        one.sizes,
        weights=[0.3],
        seed=one.seed,
        lanes=one.lanes,
        global_batch_images=mixed.global_batch_images,
        window_images=one.window_images,
    )
    assert isinstance(plain, Order)
    for step in (0, 3, 10**6):
        assert rows(batch(mixed, step)) == rows(batch(plain, step))
        for attempt in (1, 5):
            substitutes = (order.substitute(batch(order, step), attempt=attempt) for order in (mixed, plain))
            assert rows(next(substitutes)) == rows(next(substitutes))


def test_make_order_mixes_several():
    order = make_order([[20], [30, 5]], weights=None, seed=0, lanes=4, global_batch_images=8, window_images=10)
    assert isinstance(order, MixedOrder)
    assert (order.num_samples, order.num_shards, order.lanes) == (55, 3, 4)
    assert (order.global_batch_images, order.images_per_lane) == (8, 2)


def test_equal_sets_are_not_shuffled_alike():
    order = mixed([[500], [500]], weights=None, seed=0, lanes=1, global_batch_images=1, window_images=500)
    first, second = (lane_visits(each, 0, start=0, stop=500).sample for each in order.orders)
    assert np.count_nonzero(first == second) < 10


# ---- shares


@law
@given(cases(), st.integers(0, 10**9))
def test_shares_hold_in_every_prefix_of_every_lane(case: Case, start: int):
    order = case.order()
    for lane in range(order.lanes):
        for begin in (0, start):
            refs = lane_visits(order, lane, start=begin, stop=begin + 400)
            got = set_of(case, refs.shard)[:, None] == np.arange(len(case.sizes))
            wanted = np.arange(1, 401)[:, None] * order.quotas / PATTERN
            assert (np.abs(np.cumsum(got, axis=0) - wanted) < most_off(case, order) + 1e-9).all()


@law
@given(cases(), st.integers(0, 10**9), st.data())
def test_shares_hold_in_every_batch_and_every_slice_of_one(case: Case, step: int, data: st.DataObject):
    order = case.order()
    start = data.draw(st.integers(0, order.global_batch_images))
    stop = data.draw(st.integers(start, order.global_batch_images))
    for a, b in ((0, order.global_batch_images), (start, stop)):
        part = order.rank_batch(step, rank=0, world_size=1, start=a, stop=b)
        got = np.bincount(set_of(case, part.shard), minlength=len(case.sizes))
        assert (np.abs(got - (b - a) * order.quotas / PATTERN) < most_off(case, order) + 1e-9).all()


def test_neighbours_in_a_batch_are_not_always_of_different_sets():
    """Mixup pairs neighbours; a strictly alternating pattern would never mix two samples of one set."""
    order = mixed([[1000], [1000]], weights=None, seed=0, lanes=8, global_batch_images=512, window_images=100)
    which = np.concatenate([batch(order, step).shard for step in range(0, 640, 64)])
    different = np.mean(which[1:] != which[:-1])
    assert 0.7 < different < 0.8  # 3 in 4: always in the span of a pair, half of the time across


def test_shares_without_weights_are_those_of_the_sizes():
    assert pattern_quotas([100, 300], weights=None).tolist() == [25_000, 75_000]
    assert pattern_quotas([1, 10**9], weights=None).tolist() == [1, PATTERN - 1]


@law
@given(st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=MOST_SETS))
def test_weights_are_rounded_to_whole_positions(weights: list[float]):
    quotas = pattern_quotas([1] * len(weights), weights=weights)
    exact = np.array(weights) / sum(weights) * PATTERN
    assert quotas.sum() == PATTERN and quotas.min() >= 1
    rounded_up = np.count_nonzero(exact < 1)  # to 1, at the expense of the largest
    assert (np.abs(quotas - exact) < 1 + rounded_up + 1e-9).all()


def test_decimal_weights_are_exact():
    for weights in ([0.29, 0.71], [29, 71], [0.1, 0.2, 0.7], [1e-5, 1 - 1e-5]):
        quotas = pattern_quotas([7] * len(weights), weights=weights)
        assert quotas.tolist() == [round(weight / sum(weights) * PATTERN) for weight in weights]


# ---- what is read next


@law
@given(cases(), st.integers(0, 50), st.data())
def test_upcoming_shards_are_named_once_an_epoch_in_the_step_that_needs_them(
    case: Case, start_step: int, data: st.DataObject
):
    order = case.order()
    world_size = data.draw(st.sampled_from([n for n in range(1, order.lanes + 1) if order.lanes % n == 0]))
    rank = data.draw(st.integers(0, world_size - 1))
    last_read: dict[int, int] = {}  # shard -> the last epoch in which the rank has read from it
    upcoming = upcoming_shards(order, rank=rank, world_size=world_size, start_step=start_step)
    for step, (number, shards) in enumerate(itertools.islice(upcoming, 30), start=start_step):
        refs = order.rank_batch(step, rank=rank, world_size=world_size)
        read = list(zip(refs.shard.tolist(), refs.epoch.tolist(), strict=True))
        new = [shard for shard, epoch in read if epoch > last_read.get(shard, -1)]
        assert (number, shards) == (step, sorted(set(new), key=new.index))
        for shard, epoch in read:
            last_read[shard] = max(epoch, last_read.get(shard, -1))


# ---- what is refused


def test_weights_and_sizes_that_do_not_fit_are_refused():
    fitting = dict(seed=0, lanes=4, global_batch_images=8, window_images=5)
    for sizes, weights, message in (
        ([[9], [9]], [1.0], "^1 of 2 mixed data sets have a weight: give one to each of them, or to none"),
        ([[9], [9]], [1.0, 0.0], r"the weight of data set 2 of the mixture is 0\.0: make it a number above 0"),
        ([[9], [9]], [-1.0, 1.0], "data set 1 of the mixture is -1"),
        ([[9], [9]], [1.0, float("nan")], "data set 2 of the mixture is nan"),
        ([[9], [9]], [float("inf"), 1.0], "data set 1 of the mixture is inf"),
        (
            [[9], [3]],
            None,
            r"data\.lanes is 4, but data set 2 of the mixture holds only 3 images: set data\.lanes to 2,",
        ),
        ([[9], [0]], None, "data set 2 of the mixture holds only 0 images: pack some"),
        ([[9]] * 257, None, "257 data sets are mixed, at most 256 can be"),
    ):
        with pytest.raises(UserError, match=message):
            make_order(sizes, weights=weights, **fitting)


# ---- pinned


def test_pinned_batches():
    """A change of these numbers is a change of every mixed run's order: no run could be resumed across it."""
    order = mixed(
        [[7, 1, 12], [5, 9], [30]], weights=[2, 1, 1], seed=3, lanes=4, global_batch_images=12, window_images=5
    )
    assert {step: batch(order, step).sample.tolist() for step in GOLDEN_SAMPLES} == GOLDEN_SAMPLES
    assert order.substitute(batch(order, 2), attempt=1).sample.tolist() == GOLDEN_SUBSTITUTES_OF_STEP_2


GOLDEN_SAMPLES = {
    0: [35, 26, 8, 16, 45, 14, 32, 19, 1, 56, 4, 22],
    2: [25, 9, 11, 41, 15, 29, 0, 33, 52, 6, 57, 5],
    100_000: [34, 26, 10, 14, 44, 16, 31, 0, 17, 60, 3, 21],
}
GOLDEN_SUBSTITUTES_OF_STEP_2 = [27, 10, 9, 43, 14, 28, 2, 20, 50, 3, 56, 7]

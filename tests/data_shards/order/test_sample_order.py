"""The order's laws: every sample once an epoch, the same stream for any number of processes, near at hand, at once."""

import tracemalloc
from collections import Counter
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.order.sample_order import Order, SampleRefs, check_sizes, check_world_size

law = settings(max_examples=60, deadline=None)  # a deadline measures how busy the machine is


@dataclass(frozen=True)
class Case:
    shard_sizes: list[int]
    seed: int
    lanes: int
    images_per_lane: int
    window_images: int

    @property
    def order(self) -> Order:
        return Order(
            self.shard_sizes,
            seed=self.seed,
            lanes=self.lanes,
            global_batch_images=self.lanes * self.images_per_lane,
            window_images=self.window_images,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Shards of one sample too, empty ones, lanes that do not divide the samples, epochs shorter than a batch."""
    sizes = draw(st.lists(st.integers(0, 13), min_size=1, max_size=12).filter(any))
    return Case(
        shard_sizes=sizes,
        seed=draw(st.integers(0, 2**32)),
        lanes=draw(st.integers(1, min(12, sum(sizes)))),
        images_per_lane=draw(st.integers(1, 7)),
        window_images=draw(st.integers(1, 20)),
    )


def make_order(sizes: list[int], *, lanes: int = 4, batch: int = 8, seed: int = 0, window_images: int = 1000) -> Order:
    return Order(sizes, seed=seed, lanes=lanes, global_batch_images=batch, window_images=window_images)


def rows(refs: SampleRefs) -> list[tuple[int, ...]]:
    columns = (refs.epoch, refs.shard, refs.row, refs.sample)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def stream(order: Order, *, steps: int, world_size: int = 1) -> list[tuple[int, ...]]:
    """The global batches of the first steps, one visit after another."""
    return [
        row
        for step in range(steps)
        for rank in range(world_size)
        for row in rows(order.rank_batch(step, rank=rank, world_size=world_size))
    ]


# ---- every sample exactly once


@law
@given(cases())
def test_every_epoch_is_a_permutation_of_all_samples(case: Case):
    order, epochs = case.order, 3
    first_of_shard = np.concatenate([[0], np.cumsum(case.shard_sizes)])
    # A lane is at most one sample ahead of another: after these steps three epochs are over in every lane.
    steps = -(-(epochs * order.num_samples + 2 * order.lanes) // order.global_batch_images) + 1
    refs = stream(order, steps=steps)
    counts = Counter((epoch, sample) for epoch, _, _, sample in refs)
    assert set(counts.values()) == {1}
    for epoch in range(epochs):
        assert sorted(s for e, s in counts if e == epoch) == list(range(order.num_samples))
    for _, shard, row, sample in refs:
        assert 0 <= row < case.shard_sizes[shard] and sample == first_of_shard[shard] + row


@law
@given(cases())
def test_epochs_follow_one_another_without_a_gap(case: Case):
    """Epochs never go back in a lane; over the lanes, at most one sample a lane comes early or late."""
    order = case.order
    steps = -(-2 * order.num_samples // order.global_batch_images)
    refs = stream(order, steps=steps)
    lanes = np.arange(len(refs)) % order.global_batch_images // order.images_per_lane
    epochs = np.array([epoch for epoch, *_ in refs])
    for lane in range(order.lanes):
        steps_up = np.diff(epochs[lanes == lane])
        assert ((steps_up == 0) | (steps_up == 1)).all()
        assert epochs[lanes == lane][0] == 0
        for epoch in range(epochs.max()):  # those that are over
            given_images = (epochs[lanes == lane] == epoch).sum()
            assert given_images in (order.num_samples // order.lanes, -(-order.num_samples // order.lanes))


@law
@given(cases(), st.integers(0, 10**9))
def test_epochs_far_away_are_whole_as_well(case: Case, epoch: int):
    """Rounding far from the start, in 10^9 epochs: the visits around an epoch, filtered, are that epoch."""
    order = case.order
    first = max(0, epoch * order.num_samples // order.lanes - 2)
    position = np.arange(first, first + order.num_samples // order.lanes + 6)
    lane = np.repeat(np.arange(order.lanes), len(position))
    refs = order.resolve(lane, np.tile(position, order.lanes))
    assert sorted(refs.sample[refs.epoch == epoch].tolist()) == list(range(order.num_samples))


# ---- the same stream for any number of processes, micro-batches and restarts


@law
@given(cases(), st.integers(0, 50), st.data())
def test_ranks_and_micro_batches_make_up_the_global_batch(case: Case, step: int, data: st.DataObject):
    order = case.order
    whole = rows(order.rank_batch(step, rank=0, world_size=1))
    assert len(whole) == order.global_batch_images
    for world_size in (n for n in range(1, order.lanes + 1) if order.lanes % n == 0):
        part_images = order.global_batch_images // world_size
        micro = data.draw(st.integers(1, part_images))
        parts = [
            rows(order.rank_batch(step, rank=rank, world_size=world_size, start=at, stop=min(at + micro, part_images)))
            for rank in range(world_size)
            for at in range(0, part_images, micro)
        ]
        assert list(chain.from_iterable(parts)) == whole


def test_a_slice_of_anothers_part_is_refused():
    order = make_order([20, 20])
    for rank, start, stop in ((0, 0, 5), (1, 3, 6), (0, -1, 2), (2, 0, 1), (-1, 0, 1)):
        with pytest.raises(AssertionError, match="somebody else's part"):
            order.rank_batch(0, rank=rank, world_size=2, start=start, stop=stop)


@law
@given(cases(), st.lists(st.integers(0, 10**6), min_size=2, max_size=8))
def test_a_batch_is_a_function_of_its_step(case: Case, steps: list[int]):
    """Earlier calls, in any order, change nothing: only what can be recomputed is cached."""
    order = case.order
    forwards = {step: rows(order.rank_batch(step, rank=0, world_size=1)) for step in sorted(steps)}
    backwards = {step: rows(order.rank_batch(step, rank=0, world_size=1)) for step in sorted(steps, reverse=True)}
    fresh = {step: rows(case.order.rank_batch(step, rank=0, world_size=1)) for step in steps}
    assert forwards == backwards == fresh


# ---- another seed, another epoch


def test_another_seed_and_another_epoch_are_another_order():
    sizes = [25] * 40
    samples = {}
    for seed in (0, 1, 2**40):
        refs = stream(make_order(sizes, seed=seed, batch=1000), steps=2)
        for epoch in (0, 1):
            samples[seed, epoch] = [sample for e, _, _, sample in refs if e == epoch]
    for one, a in samples.items():
        for other, b in samples.items():
            if one != other:  # one place in a thousand agrees by chance
                assert sum(x == y for x, y in zip(a, b, strict=True)) < 12


def test_any_place_of_the_stream_may_hold_any_shard_and_any_row():
    """Over many epochs each lane meets each shard and row equally often: nothing in the data's order is left."""
    sizes = [10] * 12
    order = make_order(sizes, lanes=4, batch=4, window_images=30)
    position = np.arange(0, 30 * 2000, 30)  # the first visit of each epoch: N / lanes = 30
    refs = order.resolve(np.full(2000, 2), position)
    assert refs.epoch.tolist() == list(range(2000))
    assert stats.chisquare(np.bincount(refs.shard, minlength=12)).pvalue > 1e-3
    assert stats.chisquare(np.bincount(refs.row, minlength=10)).pvalue > 1e-3


# ---- windows and locality


@law
@given(cases())
def test_shuffling_stays_inside_the_window_of_the_lanes_span(case: Case):
    """With the shards' order taken from windows of one image, which do not shuffle at all."""
    wide = case.order
    plain = Case(case.shard_sizes, case.seed, case.lanes, case.images_per_lane, window_images=1).order
    for epoch in (0, 1, 7):
        edges = [(epoch * wide.num_samples + lane) // wide.lanes for lane in range(wide.lanes)]
        ends = [((epoch + 1) * wide.num_samples + lane) // wide.lanes for lane in range(wide.lanes)]
        laid: list[int] = []
        for lane, (start, end) in enumerate(zip(edges, ends, strict=True)):
            position = np.arange(start, end)
            lanes = np.full_like(position, lane)
            unshuffled, shuffled = (order.resolve(lanes, position).sample for order in (plain, wide))
            laid += unshuffled.tolist()
            for at in range(0, len(position), case.window_images):
                window = slice(at, at + case.window_images)
                assert sorted(unshuffled[window].tolist()) == sorted(shuffled[window].tolist())
        # Unshuffled, the lanes' spans laid end to end are whole shards one after another, rows in their order.
        shard_of = np.repeat(np.arange(len(case.shard_sizes)), case.shard_sizes)
        seen = [shard for i, shard in enumerate(shard_of[laid]) if i == 0 or shard != shard_of[laid][i - 1]]
        assert len(seen) == len(set(seen)) == sum(size > 0 for size in case.shard_sizes)
        assert all(b == a + 1 for a, b in pairwise(laid) if shard_of[a] == shard_of[b])


def test_windows_are_shuffled_anew_in_every_epoch_lane_and_window():
    order = make_order([400], lanes=2, batch=2, window_images=50)
    permutations = set()
    for epoch in (0, 1):
        for lane in (0, 1):
            position = np.arange(200) + 200 * epoch
            row = order.resolve(np.full(200, lane), position).row.reshape(4, 50)
            permutations |= {tuple((window - window.min()).tolist()) for window in row}
    assert len(permutations) == 2 * 2 * 4
    assert all(sorted(permutation) == list(range(50)) for permutation in permutations)


def test_a_rank_reads_few_shards_at_a_time_and_no_other_ranks():
    order = make_order([100] * 640, lanes=16, batch=64, window_images=200)  # 40 shards a lane, 2 a window
    world_size, epoch_steps = 8, 64_000 // 64
    owners: list[set[int]] = []
    for rank in range(world_size):
        owned: set[int] = set()
        for step in range(0, epoch_steps, 50):
            touched: set[int] = set()
            for near in range(step, step + 10):
                touched |= set(order.rank_batch(near, rank=rank, world_size=world_size).shard.tolist())
            assert len(touched) <= 2 * 3  # two lanes, each in a window of two shards; at most three by its edges
            owned |= touched
        owners.append(owned)
        assert len(owned) <= 2 * 40 + 1
    shared = sum(owners[a] & owners[b] != set() for a in range(8) for b in range(a))
    assert shared <= 7  # only neighbours' spans can share the shard on their edge


# ---- size


def test_visits_say_which_place_they_were_asked_for():
    order = make_order([20, 20], lanes=4, batch=8)
    part = order.rank_batch(3, rank=1, world_size=2)
    assert part.lane.tolist() == [2, 2, 3, 3] and part.position.tolist() == [6, 7, 6, 7]


@pytest.mark.parametrize("num_samples", [10**9, 10**9 + 1, 10**9 - 7])
def test_no_overflow_with_most_samples_lanes_and_epochs(num_samples: int):
    """10^9 samples, 4096 lanes, up to 4 * 10^9 epochs, against Python's integers; beyond, an error."""
    order = Order([num_samples], seed=0, lanes=4096, global_batch_images=4096, window_images=16_384)
    for position in (0, 10**6, num_samples * 5000 // 4096, 2**62 // 4096 - 1):
        lane = np.array([0, 1, 2047, 4095])
        refs = order.resolve(lane, np.full(4, position))
        others = order.substitute(refs, attempt=3)
        for number, epoch, sample, other in zip(lane.tolist(), refs.epoch, refs.sample, others.sample, strict=True):
            e = int(epoch)
            begin, end = ((e_ * num_samples + number) // 4096 for e_ in (e, e + 1))
            assert begin <= position < end
            below = sum((((e + 1) * num_samples + i) // 4096) - ((e * num_samples + i) // 4096) for i in range(number))
            window = (position - begin) // 16_384 * 16_384
            assert (
                below + window <= min(sample, other) <= max(sample, other) < below + min(window + 16_384, end - begin)
            )
    with pytest.raises(AssertionError, match="64-bit"):
        order.resolve(np.array([0]), np.array([2**62 // 4096]))


def test_memory_does_not_grow_with_the_samples():
    sizes = [10_000] * 100_000
    tracemalloc.start()
    try:
        order = Order(sizes, seed=1, lanes=256, global_batch_images=4096, window_images=16_384)
        first = order.rank_batch(0, rank=3, world_size=64)
        far = order.rank_batch(10**7, rank=3, world_size=64)
        for epoch in range(10):
            order.rank_batch(epoch * 10**9 // 4096, rank=3, world_size=64)
        kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert order.num_samples == 10**9 and len(set(first.sample.tolist())) == 64
    assert set(far.epoch.tolist()) == {40}
    assert peak_bytes < 30e6  # 100,000 shards: 0.8 MB an array
    assert kept_bytes < 12e6  # layouts of a few epochs, not of all


# ---- what is refused


def test_sizes_that_do_not_fit_are_refused_with_those_that_do():
    fitting = dict(lanes=4, global_batch_images=8, window_images=10)
    check_sizes(10, **fitting)
    for change, message in (
        ({"global_batch_images": 10}, r"global_batch_size 10 .*data\.lanes 4.* 8 and 12$"),
        ({"global_batch_images": 3}, r"global_batch_size 3 .* fit are 4$"),
        ({"lanes": 12, "global_batch_images": 12}, r"data\.lanes is 12, .* only 10 images: set data\.lanes to 6,"),
        ({"lanes": 0}, r"data\.lanes"),
        ({"global_batch_images": 0}, "global_batch_size"),
        ({"window_images": 0}, r"data\.shuffle_window_images"),
    ):
        with pytest.raises(UserError, match=message):
            check_sizes(10, **{**fitting, **change})
        with pytest.raises(UserError, match=message):
            Order([5, 5], seed=0, **{**fitting, **change})
    with pytest.raises(UserError, match="only 0 images: pack some"):
        check_sizes(0, **fitting)


@law
@given(st.integers(1, 64), st.integers(0, 70))
def test_the_processes_that_fit_are_exactly_the_divisors(lanes: int, world_size: int):
    order = make_order([100], lanes=lanes, batch=lanes)
    if world_size and lanes % world_size == 0:
        check_world_size(lanes, world_size=world_size)
        assert len(order.rank_batch(0, rank=world_size - 1, world_size=world_size).sample) == lanes // world_size
        return
    divisors = ", ".join(str(n) for n in range(1, lanes + 1) if lanes % n == 0)
    with pytest.raises(UserError, match=rf"data\.lanes {lanes} evenly: use one of {divisors} processes"):
        order.rank_batch(0, rank=0, world_size=world_size)


# ---- pinned


def test_pinned_batches():
    """A change of these numbers is a change of every run's order: no run could be resumed across it."""
    order = make_order([7, 1, 12, 5, 9], lanes=4, batch=12, seed=3, window_images=5)
    batches = {step: order.rank_batch(step, rank=0, world_size=1) for step in (0, 2, 1000)}
    assert {step: batch.sample.tolist() for step, batch in batches.items()} == GOLDEN_SAMPLES
    assert batches[2].epoch.tolist() == GOLDEN_EPOCHS_OF_STEP_2
    assert order.substitute(batches[2], attempt=2).sample.tolist() == GOLDEN_SUBSTITUTES_OF_STEP_2


GOLDEN_SAMPLES = {
    0: [25, 27, 29, 10, 8, 11, 16, 18, 15, 5, 4, 7],
    2: [32, 31, 4, 14, 13, 23, 0, 1, 3, 22, 23, 21],
    1000: [26, 25, 28, 2, 1, 33, 7, 22, 21, 5, 15, 13],
}
GOLDEN_EPOCHS_OF_STEP_2 = [0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0]
GOLDEN_SUBSTITUTES_OF_STEP_2 = [30, 32, 0, 13, 12, 25, 3, 3, 0, 24, 21, 23]

"""Substitutes of damaged samples: another one of the same window, the same one whoever asks, none tried twice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from shardvit.data_shards.order.sample_order import Order
from tests.data_shards.order.test_sample_order import Case, cases, law, make_order, rows


def places(order: Order, *, epochs: tuple[int, ...], window_images: int) -> dict[tuple[int, int, int], list[int]]:
    """(epoch, lane, window) -> the positions of its places, by the law as it is written down."""
    windows = {}
    for epoch in epochs:
        for lane in range(order.lanes):
            first, last = ((e * order.num_samples + lane) // order.lanes for e in (epoch, epoch + 1))
            for number, at in enumerate(range(first, last, window_images)):
                windows[epoch, lane, number] = list(range(at, min(at + window_images, last)))
    return windows


@law
@given(cases(), st.integers(1, 40))
def test_a_substitute_is_another_sample_of_the_same_window(case: Case, attempt: int):
    order = case.order
    for (epoch, lane, _), positions in places(order, epochs=(0, 3), window_images=case.window_images).items():
        refs = order.resolve(np.full(len(positions), lane), np.array(positions))
        others = order.substitute(refs, attempt=attempt)
        assert others.epoch.tolist() == [epoch] * len(positions)
        assert others.lane.tolist() == [lane] * len(positions) and others.position.tolist() == positions
        first_of_shard = np.cumsum([0, *case.shard_sizes])
        assert (others.sample == first_of_shard[others.shard] + others.row).all()
        if len(positions) > 1:
            assert set(others.sample.tolist()) <= set(refs.sample.tolist())
        if order.num_samples > 1:
            assert (others.sample != refs.sample).all()


@law
@given(cases())
def test_every_other_sample_of_the_window_is_tried_before_one_is_tried_again(case: Case):
    order = case.order
    for (_, lane, _), positions in places(order, epochs=(1,), window_images=case.window_images).items():
        if len(positions) > 1:
            refs = order.resolve(np.full(len(positions), lane), np.array(positions))
            tried = [order.substitute(refs, attempt=attempt).sample for attempt in range(1, len(positions))]
            for wanted, substitutes in zip(refs.sample, np.stack(tried, axis=1), strict=True):
                assert sorted([wanted, *substitutes]) == sorted(refs.sample)


def test_windows_and_lanes_of_one_place_borrow_from_the_lane_and_the_epoch():
    lonely_window = make_order([12], lanes=2, batch=2, window_images=1)
    refs = lonely_window.resolve(np.full(6, 1), np.arange(6))
    tried = {int(s) for a in range(1, 6) for s in lonely_window.substitute(refs, attempt=a).sample}
    assert tried == set(refs.sample.tolist())  # the lane's own samples
    lonely_lane = make_order([2, 2], lanes=4, batch=4)
    refs = lonely_lane.resolve(np.arange(4), np.zeros(4, dtype=np.int64))
    tried = np.stack([lonely_lane.substitute(refs, attempt=a).sample for a in (1, 2, 3)], axis=1)
    for wanted, substitutes in zip(refs.sample, tried, strict=True):
        assert sorted([wanted, *substitutes]) == [0, 1, 2, 3]
    single = make_order([1], lanes=1, batch=1)
    assert single.substitute(single.rank_batch(5, rank=0, world_size=1), attempt=1).sample.tolist() == [0]


@law
@given(cases(), st.integers(0, 10**6), st.integers(1, 20), st.data())
def test_substitutes_are_a_function_of_the_place_and_the_attempt(
    case: Case, step: int, attempt: int, data: st.DataObject
):
    """For any layout, whatever was asked before, and also for a visit that is a substitute itself."""
    order, fresh = case.order, case.order
    whole = order.rank_batch(step, rank=0, world_size=1)
    expected = rows(order.substitute(whole, attempt=attempt))
    assert rows(order.substitute(order.substitute(whole, attempt=7), attempt=attempt)) == expected
    world_size = data.draw(st.sampled_from([n for n in range(1, order.lanes + 1) if order.lanes % n == 0]))
    parts = [fresh.rank_batch(step, rank=rank, world_size=world_size) for rank in reversed(range(world_size))]
    assert [row for part in reversed(parts) for row in rows(fresh.substitute(part, attempt=attempt))] == expected


def test_substitutes_are_spread_evenly_and_differ_between_epochs_and_seeds():
    visited: dict[tuple[int, int], int] = {}
    for seed in range(200):
        order = make_order([30], lanes=1, batch=1, seed=seed)
        position = np.arange(30 * 20)
        refs = order.resolve(np.zeros_like(position), position)
        others = order.substitute(refs, attempt=1)
        for epoch, wanted, other in zip(refs.epoch, refs.sample, others.sample, strict=True):
            if wanted == 7:
                visited[seed, int(epoch)] = int(other)
    counts = np.bincount(list(visited.values()), minlength=30)
    assert counts[7] == 0 and counts.sum() == 200 * 20
    assert stats.chisquare(np.delete(counts, 7)).pvalue > 1e-3


def test_attempt_0_is_refused():
    order = make_order([20])
    with pytest.raises(AssertionError, match="attempt 0"):
        order.substitute(order.rank_batch(0, rank=0, world_size=1), attempt=0)

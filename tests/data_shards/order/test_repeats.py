"""Repeated augmentation: each image once a pass, r times in its batch, as by timm's sampler; never next to its copy."""

from collections import Counter
from dataclasses import fields
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from timm.data.distributed_sampler import RepeatAugSampler

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.order.mixture import make_order, upcoming_shards
from shardvit.data_shards.order.repeats import RepeatedOrder, arrangement, check_repeats
from shardvit.data_shards.order.sample_order import SampleRefs
from shardvit.pipeline.recipe.schema import lanes_of
from tests.data_shards.order.test_sample_order import law

Showing = tuple[int, int]  # pass, sample


def order_of(sizes: list[list[int]], *, lanes: int, batch: int, repeats: int, seed: int = 5) -> RepeatedOrder:
    order = make_order(
        sizes, weights=None, seed=seed, lanes=lanes, global_batch_images=batch, window_images=10, repeats=repeats
    )
    assert isinstance(order, RepeatedOrder)
    return order


def rows(refs: SampleRefs) -> list[tuple[int, ...]]:
    return list(zip(*(getattr(refs, each.name).tolist() for each in fields(SampleRefs)), strict=True))


def showings(order: RepeatedOrder, step: int, *, attempt: int = 0) -> list[Showing]:
    refs = order.rank_batch(step, rank=0, world_size=1)
    refs = order.substitute(refs, attempt=attempt) if attempt else refs
    return list(zip((refs.epoch // order.repeats).tolist(), refs.sample.tolist(), strict=True))


@st.composite
def orders(draw: st.DrawFn) -> RepeatedOrder:
    """One set or a mixture; also repeats that do not divide what a lane gives."""
    sizes = draw(st.lists(st.lists(st.integers(1, 13), min_size=1, max_size=5), min_size=1, max_size=3))
    repeats, lanes = draw(st.integers(2, 4)), draw(st.integers(1, min(4, *(sum(each) for each in sizes))))
    batch = lanes * (2 * repeats + draw(st.integers(0, 3 * repeats)))
    return order_of(sizes, lanes=lanes, batch=batch, repeats=repeats, seed=draw(st.integers(0, 2**32)))


# ---- each image once a pass, r times


@law
@given(orders())
def test_an_image_is_shown_r_times_a_pass_each_with_its_own_epoch(order: RepeatedOrder):
    steps = -(-3 * order.repeats * order.num_samples // order.global_batch_images) + 2
    refs = [order.rank_batch(step, rank=0, world_size=1) for step in range(steps)]
    keys = [key for each in refs for key in zip(each.epoch.tolist(), each.sample.tolist(), strict=True)]
    assert len(set(keys)) == len(keys)  # what random numbers are drawn for
    counts = Counter((epoch // order.repeats, sample) for epoch, sample in keys)
    assert max(counts.values()) == order.repeats
    unfinished = sum(count < order.repeats for count in counts.values())
    assert unfinished <= order.lanes  # the last image of each lane


@pytest.mark.parametrize(("batch", "start_step"), [(12, 0), (16, 3), (20, 7)])
def test_a_shard_is_read_ahead_once_a_pass(batch: int, start_step: int):
    order = order_of([[9, 7, 8]], lanes=2, batch=batch, repeats=3)  # divides none but the first
    last_read: dict[int, int] = {}
    for step, shards in islice(upcoming_shards(order, rank=0, world_size=1, start_step=start_step), 20):
        refs = order.rank_batch(step, rank=0, world_size=1)
        read = list(zip(refs.shard.tolist(), (refs.epoch // order.repeats).tolist(), strict=True))
        assert set(shards) == {shard for shard, each in read if each > last_read.get(shard, -1)}
        for shard, each in read:
            last_read[shard] = max(each, last_read.get(shard, -1))


@law
@given(orders(), st.integers(0, 10**6))
def test_they_are_together_in_one_batch(order: RepeatedOrder, step: int):
    counts = Counter(showings(order, step)).values()
    split = sum(count < order.repeats for count in counts)
    if order.images_per_lane % order.repeats == 0:
        assert set(counts) == {order.repeats}
    else:
        assert max(counts) <= order.repeats and split <= 2 * order.lanes


@law
@given(orders(), st.integers(0, 10**6))
def test_the_images_are_those_of_the_order_below(order: RepeatedOrder, step: int):
    """A lane goes through its samples as without repeats, so any two batch sizes go through the same."""
    for lane in range(order.lanes):
        first = step * order.images_per_lane
        refs = order.resolve(np.full(order.images_per_lane, lane), np.arange(first, first + order.images_per_lane))
        below = np.arange(first, first + order.images_per_lane) // order.repeats
        plain = order.order.resolve(np.full(len(below), lane), below)
        ours = zip((refs.epoch // order.repeats).tolist(), refs.sample.tolist(), strict=True)
        assert sorted(ours) == sorted(zip(plain.epoch.tolist(), plain.sample.tolist(), strict=True))


@law
@given(orders(), st.integers(0, 50))
def test_ranks_make_up_the_global_batch(order: RepeatedOrder, step: int):
    whole = rows(order.rank_batch(step, rank=0, world_size=1))
    for world_size in (n for n in range(1, order.lanes + 1) if order.lanes % n == 0):
        parts = [rows(order.rank_batch(step, rank=rank, world_size=world_size)) for rank in range(world_size)]
        assert [row for part in parts for row in part] == whole


@law
@given(orders(), st.integers(0, 10**4), st.integers(1, 5))
def test_a_damaged_image_has_one_substitute_in_all_its_places(order: RepeatedOrder, step: int, attempt: int):
    wanted, found = showings(order, step), showings(order, step, attempt=attempt)
    assert all(one[0] == other[0] for one, other in zip(wanted, found, strict=True))
    assert len({*zip(wanted, found, strict=True)}) == len({*wanted})


# ---- beside timm's


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_an_epochs_images_are_counted_as_by_timms_sampler(processes: int):
    """N shown images: N / r different ones, r times each, in every batch, too."""
    images, repeats, batch = 768, 3, 48
    ranks = [RepeatAugSampler(range(images), num_replicas=processes, rank=rank) for rank in range(processes)]
    here = batch // processes
    per_rank = [list(each) for each in ranks]
    steps = [
        Counter(sample for own in per_rank for sample in own[step * here : (step + 1) * here])
        for step in range(images // batch)
    ]
    assert sum(map(len, ranks)) == images
    order = order_of([[images // 4] * 4], lanes=8, batch=batch, repeats=repeats)
    ours = [Counter(sample for _, sample in showings(order, step)) for step in range(images // batch)]
    assert [sorted(each.values()) for each in ours] == [sorted(each.values()) for each in steps]
    assert [sorted(sum(each, Counter()).values()) for each in (ours, steps)] == [[repeats] * (images // repeats)] * 2


def test_a_batch_that_r_does_not_divide_splits_one_image_of_timms_and_one_of_each_lane():
    images, repeats, batch, lanes = 1024 * 3, 3, 1024, 64
    (whole,) = [list(RepeatAugSampler(range(images), num_replicas=1, rank=0))]
    theirs = Counter(whole[batch : 2 * batch])
    ours = Counter(showings(order_of([[images]], lanes=lanes, batch=batch, repeats=repeats), 1))
    assert sum(count < repeats for count in theirs.values()) == 2
    assert 0 < sum(count < repeats for count in ours.values()) <= 2 * lanes
    assert abs(len(ours) - len(theirs)) <= lanes


# ---- the arrangement for mixing


@law
@given(orders(), st.integers(0, 10**6))
def test_the_next_slot_never_has_a_copy_of_the_image(order: RepeatedOrder, step: int):
    """Over lanes, and from the last to the first (of one lane if it has four images, as `lanes: auto` gives)."""
    batch = showings(order, step)
    wraps = order.lanes > 1 or order.images_per_lane >= 4 * order.repeats
    assert all(one != other for one, other in pairwise([*batch, *batch[:wraps]]))


@pytest.mark.parametrize("repeats", [2, 3, 4])
def test_copies_of_an_image_have_different_partners(repeats: int):
    images = 8 * repeats
    image = arrangement(images, repeats=repeats, first=0) // repeats
    pairs = Counter(pairwise(image.tolist()))
    assert sum(count - 1 for count in pairs.values()) <= repeats - 1  # by coincidence, where the steps wrap around


# ---- sizes


def test_lanes_by_default_give_four_different_images_or_more_and_whole_ones_if_possible():
    assert lanes_of(1024, processes=1) == 256
    assert lanes_of(1024, processes=8, repeats=3) == 64
    assert lanes_of(2048, processes=8, repeats=3) == 128
    assert lanes_of(1056, processes=8, repeats=3) == 88  # 4 images 3 times each
    assert lanes_of(48, processes=1, repeats=3) == 4


def test_lanes_too_many_for_two_different_images_are_refused():
    for repeats, lanes, batch in ((3, 8, 48), (2, 8, 32), (1, 8, 8)):
        check_repeats(repeats, lanes=lanes, global_batch_images=batch)
    with pytest.raises(UserError, match=r"set data.lanes to 4, or less"):
        check_repeats(3, lanes=8, global_batch_images=24)
    with pytest.raises(UserError, match=r"global_batch_size to 6"):
        check_repeats(3, lanes=1, global_batch_images=5)

"""How many data workers: enough for the GPU, never more than the cores that are a process's own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardvit.pipeline.budget.gpus import find_gpu
from shardvit.pipeline.budget.speed import (
    MOST_WORKERS,
    anchored_speed,
    own_cores,
    reading_ahead,
    workers_needed,
    workers_within,
)
from tests.pipeline.budget.planning import recipe


@given(st.floats(1e-5, 0.1), st.floats(1, 20_000))
def test_so_many_keep_up_with_room_to_spare_and_not_twice_as_many(decode_seconds: float, speed: float):
    needed, busy = workers_needed(decode_seconds=decode_seconds, images_per_second=speed), decode_seconds * speed
    assert busy * 1.2 <= needed <= 1.4 * busy + 1


@given(st.floats(0.5, 256), st.one_of(st.none(), st.integers(1, 500)))
def test_the_training_loop_keeps_a_core(cores: float, needed: int | None):
    count = workers_within(cores, needed=needed)
    assert 1 <= count <= max(1, int(cores) - 1) and count <= MOST_WORKERS
    assert needed is None or count == min(needed, workers_within(cores, needed=None))


@pytest.mark.parametrize(
    ("mine", "others", "quota", "share"),
    [
        (range(64), [range(64)] * 7, None, 8.0),  # torchrun: all may use all
        (range(8), [range(8, 16), range(16, 24)], None, 8.0),  # SLURM gave each its own
        (range(8), [range(4, 12)], None, 6.0),  # half of them are another's as well
        (range(64), [range(64)] * 3, 16.0, 4.0),  # a container may use less than it sees
        (range(2), [], 64.0, 2.0),
    ],
)
def test_cores_are_shared_by_those_that_may_use_them(
    mine: range, others: list[range], quota: float | None, share: float
):
    assert own_cores(mine, on_this_host=[mine, *others], quota_cores=quota) == pytest.approx(share)


@given(st.lists(st.sets(st.integers(0, 20), min_size=1), min_size=1, max_size=6))
def test_all_shares_together_are_the_cores(sets: list[set[int]]):
    shares = [own_cores(mine, on_this_host=sets) for mine in sets]
    assert sum(shares) == pytest.approx(len(set.union(*sets)))


def test_a_larger_model_needs_fewer_workers():
    gpu = find_gpu("h100")
    speeds = [
        anchored_speed(recipe(model, batch=256), stage="pretrain", num_classes=1000, gpu=gpu)[0]
        for model in ("S/16", "B/16", "L/16")
    ]
    assert speeds == sorted(speeds, reverse=True) and 1_000 < speeds[-1] < 2_000  # the plan's anchor: 50 % of the peak


def test_what_is_held_is_that_of_the_recipes_workers_or_of_as_many_as_the_gpu_wants():
    held = {
        workers: reading_ahead(
            recipe("B/16", batch=256, data={"workers": workers}),
            image_size=224,
            micro_batch=256,
            decode_seconds=0.002,
            speed=3_000,
        )
        for workers in (0, 16, "auto")
    }
    assert held[0].ahead_bytes == 0 and held[16].ahead_bytes == 16 * 4 * 256 * 224 * 224 * 3
    assert held["auto"].workers == workers_needed(decode_seconds=0.002, images_per_second=3_000)
    assert {each.page_locked_bytes for each in held.values()} == {2 * (64 * 2**20 + 2048 + 256)}  # + labels, flips

"""Laws of the traffic between GPUs; its numbers are in test_tables.py and, from real engines, test_engine_memory.py."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardvit.pipeline.budget.communication import Workload, links_of, most_useful_gpus, traffic
from shardvit.pipeline.budget.gpus import find_gpu

JOB = Workload(300_000_000, 2, 24, 1, 25_000_000)
LINKS = links_of(find_gpu("h200"), gpus_per_node=8, node_gbps=None)
ZERO: Any = st.sampled_from([1, 2, 3, "ddp"])


def test_one_gpu_sends_nothing():
    got = traffic(JOB, gpus=1, links=LINKS, compute_seconds=1.0)
    assert (got.num_bytes, got.seconds, got.kept_share) == (0, 0, 1.0)


@given(zero_stage=ZERO, gpus=st.integers(2, 4096), seconds=st.floats(1e-4, 100), passes=st.integers(1, 8))
def test_what_is_not_hidden_is_at_most_all_and_longer_steps_keep_more(
    zero_stage: Any, gpus: int, seconds: float, passes: int
):
    job = replace(JOB, zero_stage=zero_stage)
    short, long = (
        traffic(job, gpus=gpus, links=LINKS, compute_seconds=each, accumulation_steps=passes)
        for each in (seconds, 2 * seconds)
    )
    assert 0 < short.bare_seconds <= short.seconds * (1 + 1e-9)
    assert 0 < short.kept_share <= long.kept_share + 1e-12 <= 1 + 1e-12
    assert short.num_bytes == long.num_bytes


@pytest.mark.parametrize("zero_stage", [1, 3, "ddp"])
def test_a_slower_network_between_the_nodes_costs_time_and_no_bytes(zero_stage: Any):
    slow = links_of(find_gpu("h200"), gpus_per_node=8, node_gbps=100)
    job = replace(JOB, zero_stage=zero_stage)
    for gpus, same in ((8, True), (16, False)):
        fast_one, slow_one = (traffic(job, gpus=gpus, links=each, compute_seconds=0.1) for each in (LINKS, slow))
        assert fast_one.num_bytes == slow_one.num_bytes
        assert (fast_one.seconds == slow_one.seconds) == same


@given(gpus=st.integers(2, 4096), seconds=st.floats(1e-4, 100))
def test_what_is_not_overlapped_is_waited_for(gpus: int, seconds: float):
    ways = ("overlapped", "in turn", "at once")
    overlapped, in_turn, at_once = (
        traffic(replace(JOB, way=way), gpus=gpus, links=LINKS, compute_seconds=seconds) for way in ways
    )
    assert overlapped.num_bytes == in_turn.num_bytes == at_once.num_bytes
    assert overlapped.bare_seconds <= overlapped.seconds and overlapped.bare_seconds <= in_turn.bare_seconds
    assert at_once.bare_seconds == pytest.approx(at_once.seconds)
    theirs, in_turn = (
        traffic(replace(JOB, way=way, reduction="all-reduce"), gpus=gpus, links=LINKS, compute_seconds=seconds)
        for way in ways[:2]
    )
    assert theirs.num_bytes == in_turn.num_bytes == pytest.approx(1.5 * at_once.num_bytes)
    assert theirs.bare_seconds <= in_turn.bare_seconds == pytest.approx(in_turn.seconds)


def test_only_a_model_that_waits_block_by_block_hides_gathers_behind_its_forward_pass():
    hidden, waited = (
        traffic(replace(JOB, hides_gathers=hides), gpus=64, links=LINKS, compute_seconds=10.0)
        for hides in (True, False)
    )
    assert hidden.seconds == waited.seconds and hidden.bare_seconds < waited.bare_seconds


def test_zero_2_averages_after_every_micro_batch_and_zero_1_after_the_last():
    one, two = (
        traffic(replace(JOB, zero_stage=stage), gpus=8, links=LINKS, compute_seconds=1.0, accumulation_steps=4)
        for stage in (1, 2)
    )
    assert two.reduce_bytes == 4 * one.reduce_bytes
    assert two.gather_bytes == one.gather_bytes


def test_a_larger_batch_feeds_more_gpus_and_only_numbers_that_divide_it_count():
    numbers = [
        most_useful_gpus(JOB, links=LINKS, global_batch_images=batch, images_per_second=1340)
        for batch in (512, 4096, 65536)
    ]
    assert numbers == sorted(set(numbers))
    assert most_useful_gpus(JOB, links=LINKS, global_batch_images=12, images_per_second=0.1) == 4
    assert most_useful_gpus(JOB, links=LINKS, global_batch_images=15, images_per_second=0.1) == 1


def test_usual_links():
    """NCCL's bus bandwidths: 380 GB/s in an H100's node, 340 between nodes of 8 x 400 Gbit/s, 43 with one of these."""
    assert LINKS.near_bytes_per_second == pytest.approx(380e9, rel=0.01)
    assert LINKS.far_bytes_per_second == pytest.approx(340e9, rel=0.01)
    assert links_of(find_gpu("h200"), gpus_per_node=8, node_gbps=400).far_bytes_per_second == pytest.approx(
        43e9, rel=0.02
    )

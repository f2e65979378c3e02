"""How a set suits a number of processes: every visit of an epoch is the oracle; and what is said where it does not."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardvit.data_shards.checking.findings import Finding
from shardvit.data_shards.checking.fitness import Fitness, assess
from shardvit.data_shards.order.sample_order import Order


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any),
    st.sampled_from([(1, 1, 8), (4, 2, 8), (6, 3, 2), (8, 8, 2), (12, 4, 1)]),
    st.integers(1, 40),
)
def test_fitness_is_what_the_order_does(sizes: list[int], layout: tuple[int, int, int], window: int):
    lanes, world_size, per_node = layout
    shard_bytes = [100 + 7 * number for number in range(len(sizes))]
    fitness, findings = assess(
        sizes,
        shard_bytes=shard_bytes,
        split="train",
        world_size=world_size,
        lanes=lanes,
        processes_per_node=per_node,
        window_images=window,
    )
    if sum(sizes) < lanes:
        assert fitness is None and [each.severity for each in findings] == ["problem"]
        return
    assert isinstance(fitness, Fitness)
    order = Order(sizes, seed=0, lanes=lanes, global_batch_images=lanes, window_images=window)
    by_process: dict[int, set[int]] = {}
    by_node: dict[int, set[int]] = {}
    at_a_time: dict[tuple[int, int], set[int]] = {}
    images = dict.fromkeys(range(world_size), 0)
    for step in range(sum(sizes) // lanes + 1):
        for rank in range(world_size):
            refs = order.rank_batch(step, rank=rank, world_size=world_size)
            for shard in refs.shard[refs.epoch == 0].tolist():
                images[rank] += 1
                by_process.setdefault(rank, set()).add(shard)
                by_node.setdefault(rank // per_node, set()).add(shard)
                at_a_time.setdefault((rank // per_node, step // window), set()).add(shard)

    def ends(groups: dict[int, set[int]]) -> tuple[int, int]:
        counts = [len(group) for group in groups.values()]
        return min(counts), max(counts)

    def most_bytes(groups: dict[Any, set[int]]) -> int:
        return max(sum(shard_bytes[shard] for shard in group) for group in groups.values())

    assert fitness.images_per_process == (min(images.values()), max(images.values()))
    assert fitness.shards_per_process == ends(by_process) and fitness.shards_per_node == ends(by_node)
    assert fitness.node_bytes == most_bytes(by_node) and fitness.window_bytes == most_bytes(at_a_time)
    assert fitness.node_share == pytest.approx(most_bytes(by_node) / sum(shard_bytes))
    assert fitness.window_shards == max(len(group) for group in at_a_time.values())


def suited(num_shards: int, **options: Any) -> tuple[Fitness | None, list[Finding]]:
    return assess([10_000] * num_shards, shard_bytes=[10**8] * num_shards, split="train", **options)


def test_lanes_that_do_not_divide_are_a_problem_with_a_way_out():
    fitness, (found,) = suited(100, world_size=6, lanes=64, processes_per_node=8)
    assert fitness is None and found.severity == "problem" and found.kind == "fitness"
    assert "data.lanes to 60" in found.remedy and "1, 2, 4, 8, 16, 32 or 64 processes" in found.remedy


def test_lanes_are_chosen_where_none_are_named():
    fitness, (found,) = suited(1000, world_size=24, lanes=None, processes_per_node=8)
    assert fitness is not None and (fitness.lanes, fitness.nodes) == (240, 3)
    assert found.severity == "info" and "240" in found.remedy
    assert suited(1000, world_size=32, lanes=None, processes_per_node=8)[1] == []


def test_too_few_shards_for_the_nodes():
    _, (found,) = suited(10, world_size=64, lanes=64, processes_per_node=8)
    assert found.kind == "few-shards" and found.severity == "warning" and "--samples-per-shard" in found.remedy

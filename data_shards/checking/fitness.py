"""Assess how shards suit a world size: does it divide the lanes, what does each node read? No I/O.

Figures are those of epoch 0 with seed 0; other epochs read other shards, but the same amounts within about a percent.
Takes a second for any number of samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardvit.data_shards.checking.findings import Finding, finding
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.order.sample_order import Int64s, Order, check_sizes
from shardvit.data_shards.text import counted, show_bytes

DEFAULT_LANES = 256  # `data.lanes: auto` for batches that are multiples of 256
WINDOW_IMAGES = 16384  # the recipe's default, data.shuffle_window_images
_MOST_PLACES = 4_000_000  # resolved; larger sets are sampled at a stride that hits nearly every shard
_GOOD_SHARDS_PER_NODE = 32  # so that the one or two shared with neighbours are a few percent
_FEWEST_SAMPLES = 50  # below it, a shard costs more than it holds
_LARGE_SHARE = 1.5  # times its fair share: if the busiest node reads more, locality is being lost


@dataclass(frozen=True)
class Fitness:
    """Spread of the samples over processes and nodes; shares and bytes count whole shards."""

    world_size: int
    nodes: int
    processes_per_node: int  # one per GPU
    lanes: int  # assumed by the other figures
    fitting_world_sizes: tuple[int, ...]  # divisors of `lanes`
    images_per_process: tuple[int, int]  # samples in an epoch, (least, most)
    shards_per_process: tuple[int, int]  # distinct shards read in an epoch, (least, most)
    shards_per_node: tuple[int, int]  # likewise
    node_share: float  # share of all bytes that the busiest node reads in an epoch, 0 to 1
    node_bytes: int
    window_shards: int  # most distinct shards that a node reads within one shuffle window
    window_bytes: int


def assess(
    shard_sizes: Sequence[int],
    *,
    shard_bytes: Sequence[int],
    split: str,
    world_size: int,
    lanes: int | None,
    processes_per_node: int,
    window_images: int = WINDOW_IMAGES,
) -> tuple[Fitness | None, list[Finding]]:
    """Assess shards for `world_size` processes; None if they do not fit. `lanes` None: near the default."""
    findings: list[Finding] = []
    if lanes is None:
        lanes = DEFAULT_LANES if DEFAULT_LANES % world_size == 0 else max(1, DEFAULT_LANES // world_size) * world_size
        if lanes != DEFAULT_LANES:
            message = f"{world_size} processes do not divide {DEFAULT_LANES} lanes: {lanes} are assumed here"
            remedy = f"set data.lanes to {lanes} and global_batch_size to a multiple of it"
            findings.append(finding("fitness", split=split, severity="info", message=message, remedy=remedy))
    elif lanes % world_size:
        near = max(1, lanes // world_size) * world_size
        message = f"{world_size} processes cannot share {lanes} lanes evenly"
        remedy = f"set data.lanes to {near}, or use {_listed(_divisors(lanes))} processes"
        return None, [finding("fitness", split=split, message=message, remedy=remedy)]
    try:
        check_sizes(sum(shard_sizes), lanes=lanes, global_batch_images=lanes, window_images=window_images)
    except UserError:
        message = f"there are only {sum(shard_sizes):,} samples for {lanes} lanes"
        remedy = f"use at most {sum(shard_sizes):,} lanes, and as many processes at the most; or pack more images"
        return None, [*findings, finding("fitness", split=split, message=message, remedy=remedy)]

    fitness = _fitness(
        np.asarray(shard_sizes, np.int64),
        np.asarray(shard_bytes, np.int64),
        world_size=world_size,
        lanes=lanes,
        processes_per_node=processes_per_node,
        window_images=window_images,
    )
    if fitness.nodes > 1 and fitness.node_share > _LARGE_SHARE / fitness.nodes:
        message = (
            f"{fitness.nodes} nodes have only {counted(len(shard_sizes), 'shard')}: the busiest one reads "
            f"{100 * fitness.node_share:.0f} % of the data in an epoch, where {100 / fitness.nodes:.0f} % would be fair"
        )
        samples = sum(shard_sizes) // (_GOOD_SHARDS_PER_NODE * fitness.nodes)
        remedy = "harmless where every node has all shards on a disk of its own; where they are fetched, " + (
            f"pack smaller shards: --samples-per-shard {samples}" if samples >= _FEWEST_SAMPLES else "use fewer nodes"
        )
        findings.append(finding("few-shards", split=split, message=message, remedy=remedy))
    return fitness, findings


def _fitness(
    sizes: Int64s, num_bytes: Int64s, *, world_size: int, lanes: int, processes_per_node: int, window_images: int
) -> Fitness:
    # All places of epoch 0, or for large sets a regular sample with the first and last place of each window.
    total, own_lanes = int(sizes.sum()), lanes // world_size
    stride = min(max(1, int(sizes[sizes > 0].min()) // 2, total // _MOST_PLACES), window_images)
    spans = (total + np.arange(lanes, dtype=np.int64)) // lanes
    longest = int(spans.max())
    starts = np.arange(0, longest, window_images)
    steps = np.unique(np.concatenate([np.arange(0, longest, stride), starts, starts[1:] - 1, [longest - 1]]))
    lane, position = (each.ravel() for each in np.meshgrid(np.arange(lanes), steps, indexing="ij"))
    position = np.minimum(position, spans[lane] - 1)
    # A window of one image skips the shuffle; a full window touches the same shards.
    order = Order(sizes.tolist(), seed=0, lanes=lanes, global_batch_images=lanes, window_images=1)
    shard = order.resolve(lane, position).shard

    process = lane // own_lanes
    node, window = process // processes_per_node, position // window_images
    per_process, _ = _distinct(process, shard, shards=len(sizes))
    per_node, node_shard = _distinct(node, shard, shards=len(sizes))
    per_window, window_shard = _distinct(node * (int(window.max()) + 1) + window, shard, shards=len(sizes))
    node_bytes = np.bincount(per_node, weights=num_bytes[node_shard])
    return Fitness(
        world_size=world_size,
        nodes=-(-world_size // processes_per_node),
        processes_per_node=processes_per_node,
        lanes=lanes,
        fitting_world_sizes=tuple(_divisors(lanes)),
        images_per_process=_ends(spans.reshape(world_size, own_lanes).sum(axis=1)),
        shards_per_process=_ends(np.bincount(per_process)),
        shards_per_node=_ends(np.bincount(per_node)),
        node_share=float(node_bytes.max() / max(1, num_bytes.sum())),
        node_bytes=int(node_bytes.max()),
        window_shards=int(np.bincount(per_window).max()),
        window_bytes=int(np.bincount(per_window, weights=num_bytes[window_shard]).max()),
    )


def describe(fitness: Fitness) -> list[tuple[str, str]]:
    """Format as (label, text) lines."""
    shards, images = _range(fitness.shards_per_process, "shard"), _range(fitness.images_per_process, "image")
    rows = [
        ("lanes", f"{fitness.lanes}: fit for {_listed(fitness.fitting_world_sizes)} processes"),
        ("a process", f"{images} and {shards} an epoch"),
    ]
    if fitness.nodes > 1:
        share = f"at most {100 * fitness.node_share:.1f} % of the data, {show_bytes(fitness.node_bytes)}"
        fair = f"fair would be {100 / fitness.nodes:.1f} %"
        rows.append(("a node", f"{_range(fitness.shards_per_node, 'shard')} an epoch, {share}; {fair}"))
    window = f"{counted(fitness.window_shards, 'shard')}, {show_bytes(fitness.window_bytes)}"
    rows.append(("at a time", f"{window}: what a node's cache must hold at least"))
    return rows


def _distinct(who: Int64s, shard: Int64s, *, shards: int) -> tuple[Int64s, Int64s]:
    pairs = np.unique(who * shards + shard)
    return pairs // shards, pairs % shards


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + (" or " if len(numbers) > 1 else "") + str(numbers[-1])


def _range(ends: tuple[int, int], noun: str) -> str:
    return ("" if ends[0] == ends[1] else f"{ends[0]:,} to ") + counted(ends[1], noun)


def _ends(counts: Int64s) -> tuple[int, int]:
    return int(counts.min()), int(counts.max())

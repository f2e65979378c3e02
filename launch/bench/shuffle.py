"""Shuffle quality: how near the order of samples comes to a perfect permutation, beside webdataset's buffer shuffle.

Run `python -m launch.bench.shuffle`; records/shuffle.txt has what it printed. No image is read, only sample numbers
are shuffled: ours by data_shards.order.sample_order, webdataset's by its own code (SimpleShardList's shuffle of the shards, then
filters.shuffle over each reader's samples), one epoch each.

Measured, on equal shards that are sorted by class:
- gap: the distance in the stream of samples that are neighbours in a shard, as a share of the epoch (median, and the
  quantile that one in twenty is below). In a perfect permutation 0.293 and 0.025: two random points of a line.
- classes: how many different classes a batch holds, on average. More than in a perfect permutation where the lanes are
  as many as the shards: then every batch has one sample of each shard, and is more even than chance.
- distance: the total-variation distance between the classes of a batch and those of the data set (0 to 1), on average.
- shards: how many different shards the samples of eight batches in a row come from, on average: the shuffle's price.
  Ours has these shards at hand as files, each process those of its lanes; webdataset has that many samples, encoded,
  in the memory of each of its readers.

Costs 10 seconds. The random numbers are seeded: it prints the same everywhere, for one version of webdataset.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

from data_shards.order.sample_order import Order

Stream = NDArray[np.int64]  # the samples of one epoch, in the order of their visits

_BATCHES_AT_ONCE = 8
# Lanes and windows: the defaults, and ever less to have at hand.
_OURS = ((256, 16_384), (64, 16_384), (64, 1024), (8, 16_384), (8, 4096), (8, 1024), (1, 16_384), (1, 4096))
# Buffers of webdataset's and the processes (ranks x workers) that have one each.
_BUFFERS = ((1000, 1), (5000, 1), (1000, 8), (5000, 8), (1000, 64), (5000, 64))


@dataclass(frozen=True)
class Quality:
    """How well a stream is shuffled; see the module's docstring."""

    median_gap: float
    low_gap: float
    classes_per_batch: float
    class_distance: float
    shards_at_once: float


def measure(stream: Stream, *, shard_sizes: Sequence[int], num_classes: int, batch_images: int) -> Quality:
    """Measure one epoch's stream, [number of samples], of data sorted by class; incomplete batches are left out."""
    num_samples = len(stream)
    shard = np.repeat(np.arange(len(shard_sizes)), shard_sizes)
    place = np.empty(num_samples, dtype=np.int64)
    place[stream] = np.arange(num_samples)
    gap = np.abs(np.diff(place))[np.diff(shard) == 0] / num_samples
    whole = num_samples // batch_images * batch_images
    label = sorted_classes(num_samples, num_classes=num_classes)
    counts = np.stack(
        [np.bincount(batch, minlength=num_classes) for batch in label[stream[:whole]].reshape(-1, batch_images)]
    )
    share = np.bincount(label, minlength=num_classes) / num_samples
    many = batch_images * _BATCHES_AT_ONCE
    at_once = shard[stream[: num_samples // many * many]].reshape(-1, many)
    return Quality(
        median_gap=float(np.median(gap)),
        low_gap=float(np.quantile(gap, 0.05)),
        classes_per_batch=float((counts > 0).sum(axis=1).mean()),
        class_distance=float(np.abs(counts / batch_images - share).sum(axis=1).mean() / 2),
        shards_at_once=float(np.mean([len(np.unique(each)) for each in at_once])),
    )


def sorted_classes(num_samples: int, *, num_classes: int) -> Stream:
    """The class of each sample, [number of samples]: equally many of each, in order."""
    return np.arange(num_samples) * num_classes // num_samples


def expected_classes(num_samples: int, *, num_classes: int, batch_images: int) -> float:
    """Different classes in a batch, on average over all permutations of a set with equally many samples of each."""
    others = num_samples - num_samples // num_classes

    def log_choices(n: int) -> float:
        return math.lgamma(n + 1) - math.lgamma(n - batch_images + 1)

    return num_classes * (1 - math.exp(log_choices(others) - log_choices(num_samples)))


def our_stream(shard_sizes: Sequence[int], *, lanes: int, window_images: int, batch_images: int, seed: int) -> Stream:
    """One epoch of `data_shards.order.sample_order`."""
    order = Order(shard_sizes, seed=seed, lanes=lanes, global_batch_images=batch_images, window_images=window_images)
    visits = [order.rank_batch(step, rank=0, world_size=1) for step in range(order.num_samples // batch_images + 2)]
    return np.concatenate([each.sample[each.epoch == 0] for each in visits])


def webdataset_stream(
    shard_sizes: Sequence[int], *, buffer_images: int, readers: int, batch_images: int, seed: int
) -> Stream:
    """One epoch of webdataset's shuffle of shards and its buffer; each reader gives its part of every batch."""
    from webdataset.filters import shuffle
    from webdataset.shardlists import SimpleShardList

    assert len(shard_sizes) % readers == 0 and batch_images % readers == 0, "readers that end together"
    first = np.cumsum([0, *shard_sizes]).tolist()

    def samples(reader: int) -> Iterator[int]:
        # All readers shuffle the shards alike and take each n-th, as webdataset's split_by_node and split_by_worker do.
        shards = SimpleShardList([str(number) for number in range(len(shard_sizes))], seed=seed)
        for shard in itertools.islice(iter(shards), reader, None, readers):
            yield from range(first[int(shard["url"])], first[int(shard["url"]) + 1])

    parts = [
        np.fromiter(shuffle(buffer_images, seed=seed + reader)(samples(reader)), dtype=np.int64)
        for reader in range(readers)
    ]
    own = batch_images // readers
    longest = max(len(part) for part in parts)
    return np.concatenate([part[at : at + own] for at in range(0, longest, own) for part in parts])


def perfect_stream(num_samples: int, *, seed: int) -> Stream:
    """A permutation of all samples, as a map-style loader with an index in memory makes it."""
    return np.random.default_rng(seed).permutation(num_samples)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Shuffle quality of the order, beside webdataset's buffer shuffle.")
    parser.add_argument("--shards", type=int, default=256, help="number of shards (%(default)s)")
    parser.add_argument("--shard-samples", type=int, default=1000, help="samples of each shard (%(default)s)")
    parser.add_argument("--classes", type=int, default=1000, help="classes, in order in the shards (%(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="samples of a global batch (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of every shuffle (%(default)s)")
    args = parser.parse_args()
    sizes, batch, seed = [args.shard_samples] * args.shards, args.batch, args.seed
    num_samples = sum(sizes)

    def ours(lanes: int, window: int) -> Stream:
        return our_stream(sizes, lanes=lanes, window_images=window, batch_images=batch, seed=seed)

    def buffer(images: int, readers: int) -> Stream:
        return webdataset_stream(sizes, buffer_images=images, readers=readers, batch_images=batch, seed=seed)

    rows: list[tuple[str, Callable[[], Stream]]] = [
        ("perfect permutation", lambda: perfect_stream(num_samples, seed=seed))
    ]
    rows += [
        (f"ours, {lanes} lanes, window {window}", lambda lanes=lanes, window=window: ours(lanes, window))
        for lanes, window in _OURS
        if batch % lanes == 0 and lanes <= num_samples
    ]
    rows += [
        (
            f"webdataset shuffle({images}), {readers} reader{'s' * (readers > 1)}",
            lambda i=images, r=readers: buffer(i, r),
        )
        for images, readers in _BUFFERS
        if args.shards % readers == 0 and batch % readers == 0
    ]
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, webdataset {version('webdataset')}, ", end="")
    print(f"{os.cpu_count()} cores")
    print(f"{num_samples:,} samples in {args.shards} shards, {args.classes} classes in order, batches of {batch}")
    expected = expected_classes(num_samples, num_classes=args.classes, batch_images=batch)
    print(f"classes in a batch over all permutations: {expected:.1f}\n")
    print(f"{'':38}{'gap: median':>12}{'5 %':>9}{'classes':>9}{'distance':>10}{'shards':>8}")
    for name, make in rows:
        q = measure(make(), shard_sizes=sizes, num_classes=args.classes, batch_images=batch)
        print(f"{name:38}{q.median_gap:12.4f}{q.low_gap:9.4f}{q.classes_per_batch:9.1f}", end="")
        print(f"{q.class_distance:10.3f}{q.shards_at_once:8.1f}", flush=True)


if __name__ == "__main__":
    main()

"""Shuffle quality: the figures are right where they are known, and ours beats a buffer; the benchmarks run."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from launch.bench.shuffle import expected_classes, measure, our_stream, perfect_stream, webdataset_stream

REPOSITORY = Path(__file__).parents[3]


def test_ours_is_nearer_to_a_perfect_permutation_than_a_buffer_of_webdatasets():
    """On data sorted by class: 20,000 samples in 40 shards, 100 classes, batches of 64, a window of five shards."""
    shard_sizes, classes = [500] * 40, 100
    streams = {
        "perfect": perfect_stream(20_000, seed=1),
        "ours": our_stream(shard_sizes, lanes=8, window_images=2500, batch_images=64, seed=1),
        "buffer": webdataset_stream(shard_sizes, buffer_images=1000, readers=1, batch_images=64, seed=1),
        "readers": webdataset_stream(shard_sizes, buffer_images=1000, readers=8, batch_images=64, seed=1),
    }
    quality = {}
    for name, stream_ in streams.items():
        assert sorted(stream_.tolist()) == list(range(20_000))  # of all samples; neither drops any here
        quality[name] = measure(stream_, shard_sizes=shard_sizes, num_classes=classes, batch_images=64)
    perfect, ours = quality["perfect"], quality["ours"]
    assert perfect.median_gap == pytest.approx(1 - 0.5**0.5, abs=0.01)  # of two random points of [0, 1]
    assert perfect.low_gap == pytest.approx(1 - 0.95**0.5, abs=0.003)
    assert perfect.classes_per_batch == pytest.approx(
        expected_classes(20_000, num_classes=classes, batch_images=64), 0.02
    )
    for other in (quality["buffer"], quality["readers"]):
        assert abs(ours.median_gap - perfect.median_gap) < abs(other.median_gap - perfect.median_gap)
        assert abs(ours.low_gap - perfect.low_gap) < abs(other.low_gap - perfect.low_gap)
        assert abs(ours.classes_per_batch - perfect.classes_per_batch) < abs(
            other.classes_per_batch - perfect.classes_per_batch
        )
        assert abs(ours.class_distance - perfect.class_distance) < abs(other.class_distance - perfect.class_distance)


def test_an_unshuffled_stream_is_told_from_a_shuffled_one():
    quality = measure(np.arange(1000), shard_sizes=[100] * 10, num_classes=10, batch_images=50)
    assert quality.median_gap == quality.low_gap == 1 / 1000
    assert quality.classes_per_batch == 1 and quality.class_distance == pytest.approx(0.9)
    assert quality.shards_at_once == 4  # eight batches in a row


@pytest.mark.parametrize("benchmark", ["order", "shuffle"])
def test_the_benchmarks_run(benchmark: str):
    small = {
        "order": ["--samples", "10000", "--shards", "20", "--lanes", "64", "--batch", "128", "--processes", "1"],
        "shuffle": ["--shards", "8", "--shard-samples", "50", "--classes", "10", "--batch", "16"],
    }[benchmark]
    command = [sys.executable, "-m", f"launch.bench.{benchmark}", *small]
    printed = subprocess.run(command, cwd=REPOSITORY, check=True, text=True, stdout=subprocess.PIPE).stdout
    rows_with_numbers = {"order": ["peak memory, MB", "mixed"], "shuffle": ["perfect", "ours, 8 lanes", "8 readers"]}
    for words in rows_with_numbers[benchmark]:
        assert words in printed

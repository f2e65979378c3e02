"""What planning costs at the largest size: 10^9 samples in 10^5 shards, the first batch of a resumed run in epoch 3.

Run `python -m launch.bench.order`; records/order.txt has what it printed. Nothing is read, samples are numbers only.

Measured in processes of their own, each started afresh (median and worst of them):
- first batch: seconds from before NumPy is imported until one global batch of 4096 is resolved at a random step of
  the third epoch, the order made from a Python list of shard sizes on the way;
- its peak memory: the most the process ever had resident, interpreter, NumPy and the list of sizes included;
- a later batch: the median over 50 random steps of the same epoch, for all 4096 visits and for one rank's of 64;
- the same for two such data sets of half the size, mixed.
Limits that the project sets itself: 1 second and 200 MB. Costs 3 seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

_EPOCH = 3  # counted from 1
_BATCHES = 50


def measure(samples: int, *, shards: int, lanes: int, batch_images: int, sets: int, seed: int) -> dict[str, float]:
    """Plan one batch, then more; in this process, so call it in a fresh one. Seconds and megabytes by name."""
    picked = random.Random(seed)
    sizes = [samples // shards] * shards
    begin = time.perf_counter()
    from data_shards.order.mixture import make_order  # imports NumPy

    imported = time.perf_counter()
    order = make_order(
        [sizes[number::sets] for number in range(sets)],
        weights=None,
        seed=seed,
        lanes=lanes,
        global_batch_images=batch_images,
        window_images=16_384,
    )
    made = time.perf_counter()
    steps = range((_EPOCH - 1) * samples // batch_images, _EPOCH * samples // batch_images)
    order.rank_batch(picked.choice(steps), rank=0, world_size=1)
    first = time.perf_counter()
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def later(world_size: int) -> float:
        return statistics.median(
            _seconds(lambda: order.rank_batch(picked.choice(steps), rank=world_size // 2, world_size=world_size))
            for _ in range(_BATCHES)
        )

    return {
        "import NumPy, s": imported - begin,
        "make the order, s": made - imported,
        "resolve the batch, s": first - made,
        "first batch together, s": first - begin,
        "peak memory, MB": peak_bytes / 1e6,
        "a later batch, ms": later(1) * 1e3,
        "a later batch of one rank of 64, ms": later(64) * 1e3,
    }


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    """Print the table, or with --in-process one process's numbers as JSON."""
    parser = argparse.ArgumentParser(description="Time and memory until the first batch of a huge set is planned.")
    parser.add_argument("--samples", type=int, default=10**9, help="of an epoch (%(default)s)")
    parser.add_argument("--shards", type=int, default=10**5, help="equal ones (%(default)s)")
    parser.add_argument("--lanes", type=int, default=256, help="a multiple of 64 (%(default)s)")
    parser.add_argument("--batch", type=int, default=4096, help="samples of a global batch (%(default)s)")
    parser.add_argument("--processes", type=int, default=5, help="fresh ones to measure in (%(default)s)")
    parser.add_argument("--sets", type=int, default=1, help="with --in-process: data sets to mix (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="with --in-process: of the order and the steps (%(default)s)"
    )
    parser.add_argument("--in-process", action="store_true", help="measure here, once, and print JSON")
    args = parser.parse_args()
    if args.in_process:
        sizes = dict(shards=args.shards, lanes=args.lanes, batch_images=args.batch)
        print(json.dumps(measure(args.samples, **sizes, sets=args.sets, seed=args.seed)))
        return
    print(f"Python {platform.python_version()}, NumPy {version('numpy')}, {os.cpu_count()} cores")
    print(
        f"{args.samples:,} samples in {args.shards:,} shards, {args.lanes} lanes, batches of {args.batch:,}; ", end=""
    )
    print(f"median and worst of {args.processes} fresh processes")
    for sets in (1, 2):
        results = []
        for seed in range(args.processes):
            command = [sys.executable, "-m", "launch.bench.order", *sys.argv[1:], "--in-process"]
            command += ["--sets", str(sets), "--seed", str(seed)]
            results.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
        print(f"\n{'one data set' if sets == 1 else 'two data sets, mixed':38}{'median':>10}{'worst':>10}")
        for name in results[0]:
            values = [result[name] for result in results]
            print(f"{name:38}{statistics.median(values):10.3f}{max(values):10.3f}")


if __name__ == "__main__":
    main()

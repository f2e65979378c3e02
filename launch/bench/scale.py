"""Measure what grows with ranks, shards and files: 1,024 ranks on 128 hosts, 10^9 samples in 10^5 shards.

Run `python -m launch.bench.scale [--only NAME]`; records/scale.txt has what it printed. One machine simulates: ranks
are threads (or a few processes) that run the product's own code, files have the real number and no content, and
operations are counted, which no other load of the machine changes. What is calculated from fewer ranks says so.

Each measure runs in a process of its own, started afresh. Costs about two minutes, 2 GB of memory and 1 GB below the
folder for temporary files. It measures no network and no file server: there only the number of operations is known.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import version

from launch.bench.scale_rows import HOSTS, RANKS, SAMPLES, SHARDS, Row, table

# Name -> "module:function", which takes nothing and returns rows.
MEASURES: dict[str, str] = {
    "opening": "launch.bench.scale_shards:opening",
    "exchanges": "launch.bench.scale_exchanges:exchanges",
    "death": "launch.bench.scale_ranks:death",
    "heartbeats": "launch.bench.scale_ranks:heartbeats",
    "checkpoints": "launch.bench.scale_checkpoints:checkpoints",
}


def measure(name: str) -> list[Row]:
    """The rows of one measure, in this process."""
    module, _, function = MEASURES[name].partition(":")
    run: Callable[[], list[Row]] = getattr(import_module(module), function)
    return run()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure everything, or one measure, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.bench.scale", description="What grows with the number of ranks."
    )
    parser.add_argument("--only", choices=sorted(MEASURES), help="this measure alone")
    parser.add_argument("--json", action="store_true", help="print rows as JSON, measured in this process")
    given = parser.parse_args(arguments)
    names = [given.only] if given.only else list(MEASURES)
    if given.json:
        print(json.dumps([asdict(row) for name in names for row in measure(name)]))
        return 0
    rows: list[Row] = []
    for name in names:
        command = [sys.executable, "-m", "launch.bench.scale", "--only", name, "--json"]
        told = subprocess.run(command, capture_output=True, text=True, check=False)
        if told.returncode:
            print(f"{name} failed:\n{told.stderr}", file=sys.stderr)
            return 1
        rows += [Row(**row) for row in json.loads(told.stdout.splitlines()[-1])]
    print(f"{RANKS:,} ranks on {HOSTS} hosts, {SAMPLES:,} samples in {SHARDS:,} shards; ", end="")
    print(f"torch {version('torch')}, Python {platform.python_version()}\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure what grows with ranks, shards and files: 1,024 ranks on 128 hosts, 10^9 samples in 10^5 shards.

Run `python -m shardvit.launch.bench.scale [--only NAME]`; output in records/scale.txt. One machine simulates: ranks are
threads or a few processes that run the product's code, files are empty but in their real number, and operations are
counted. Costs about two minutes, 2 GB of memory and 1 GB of temporary files. Does not measure networks or file servers.
"""

import argparse
import json
import platform
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from itertools import zip_longest

from shardvit.launch.bench.measure import run_json

RANKS = 1024
HOSTS = 128
SHARDS = 100_000
SAMPLES = 1_000_000_000

_HEADS = ("what", "before", "now", "wanted")
_WIDTH = 38
# Functions without parameters that return rows.
MEASURES: dict[str, str] = {
    "opening": "shardvit.launch.bench.scale_shards:opening",
    "exchanges": "shardvit.launch.bench.scale_ranks:exchanges",
    "death": "shardvit.launch.bench.scale_ranks:death",
    "heartbeats": "shardvit.launch.bench.scale_ranks:heartbeats",
    "checkpoints": "shardvit.launch.bench.scale_checkpoints:checkpoints",
}


@dataclass(frozen=True)
class Row:
    """A quantity that grows with the number of ranks, shards or files."""

    what: str  # quantity and unit
    before: str  # on commit 56ab78a, or with its algorithm
    now: str
    wanted: str  # the bound; "": none set
    how: str  # what was simulated, and what was extrapolated


def table(rows: Sequence[Row]) -> str:
    """Format the rows as plain text, each followed by its `how`."""
    cells = [(row.what, row.before, row.now, row.wanted) for row in rows]
    columns = [max(len(head), *(min(len(row[i]), _WIDTH) for row in cells)) for i, head in enumerate(_HEADS)]
    lines = [_line(_HEADS, columns), _line(["-" * width for width in columns], columns)]
    for row, own in zip(rows, cells, strict=True):
        wrapped = zip_longest(*(textwrap.wrap(cell, _WIDTH) for cell in own), fillvalue="")
        lines += [_line(each, columns) for each in wrapped]
        lines += textwrap.wrap(row.how, sum(columns) + 6, initial_indent="    ", subsequent_indent="    ")
        lines.append("")
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all measures, or one, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m shardvit.launch.bench.scale", description="What grows with the number of ranks."
    )
    parser.add_argument("--only", choices=sorted(MEASURES), help="this measure alone")
    parser.add_argument("--json", action="store_true", help="print rows as JSON, measured in this process")
    given = parser.parse_args(arguments)
    names = [given.only] if given.only else list(MEASURES)
    if given.json:
        places = (MEASURES[name].split(":") for name in names)
        print(json.dumps([asdict(row) for module, name in places for row in getattr(import_module(module), name)()]))
        return 0
    found = (run_json("shardvit.launch.bench.scale", "--only", name, "--json") for name in names)
    rows = [Row(**row) for each in found for row in each]
    print(f"{RANKS:,} ranks on {HOSTS} hosts, {SAMPLES:,} samples in {SHARDS:,} shards; ", end="")
    print(f"torch {version('torch')}, Python {platform.python_version()}\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

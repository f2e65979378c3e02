"""Time `make demo` to its first line, its first training step and its end, for one or two checkouts.

Run `python -m shardvit.launch.bench.demo_start --before CHECKOUT`; output in records/demo_start.txt. Checkouts take
turns; the first turn of each, which reads the libraries from disk, does not count. Target: first step in at most half
the time of `--before`, median of the rounds' ratios. 2 to 3 minutes per demo on 2 cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from shardvit.launch.bench.measure import median_ratio, setting

_HERE = Path(__file__).resolve().parents[2]
_TARGET = 0.5
_NAMES = ("first line", "first step", "end")


@dataclass(frozen=True)
class Waits:
    """Seconds from the command to each event."""

    first_line: float
    first_step: float
    end: float


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Seconds to the demo's first line, first step and end.")
    parser.add_argument("--before", type=Path, help="another checkout, to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="demos of each checkout (%(default)s)")
    options = parser.parse_args()
    checkouts = {"before": options.before, "now": _HERE} if options.before else {"now": _HERE}
    waits: dict[str, list[Waits]] = {name: [] for name in checkouts}
    for _ in range(options.rounds + 1):
        for name, checkout in checkouts.items():
            waits[name].append(demo(checkout.resolve()))
    print("\n".join(report({name: found[1:] for name, found in waits.items()})))


def demo(checkout: Path) -> Waits:
    """Run a checkout's demo in an empty folder; RuntimeError with its output if it fails."""
    with tempfile.TemporaryDirectory(prefix="shardvit-bench-") as name:
        mark = Path(name) / "first-step"
        fault = {"action": "sleep", "point": "between_steps", "rank": 0, "step": 1, "once": str(mark)}
        begin = time.time()
        process = subprocess.Popen(
            [sys.executable, "-m", "shardvit.launch.cli", "demo"],
            cwd=name,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(checkout / "tests" / "faults" / "inject"), str(checkout)]),
                "SHARDVIT_FAULT": json.dumps([fault]),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        first = process.stdout.readline()
        first_line = time.time() - begin
        rest = process.stdout.read()
        if process.wait() or not mark.exists():
            raise RuntimeError(f"the demo of {checkout} ended with exit code {process.returncode}:\n{first}{rest}")
        return Waits(first_line, mark.stat().st_mtime - begin, time.time() - begin)


def report(waits: Mapping[str, Sequence[Waits]]) -> list[str]:
    """Format the table and, for two checkouts, whether the target is met."""
    rounds = len(waits["now"])
    lines = [
        setting("torch", "deepspeed"),
        f"make demo, {rounds} round{'s' if rounds > 1 else ''}: seconds from the command, median (least to worst)",
        "",
        f"{'':10}" + "".join(f"{name:>26}" for name in _NAMES),
    ]
    columns = {name: list(zip(*map(astuple, found), strict=True)) for name, found in waits.items()}
    for name, found in columns.items():
        cells = [f"{statistics.median(column):.2f} ({min(column):.2f} to {max(column):.2f})" for column in found]
        lines.append(f"{name:10}" + "".join(f"{cell:>26}" for cell in cells))
    if "before" in columns:
        ratios = [median_ratio(now, before) for now, before in zip(columns["now"], columns["before"], strict=True)]
        shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in zip(_NAMES, ratios, strict=True))
        verdict = "met" if ratios[1] <= _TARGET else "MISSED"
        lines += ["", f"now to before, median of the rounds' ratios: {shown}; first step, target {_TARGET}: {verdict}"]
    return lines


if __name__ == "__main__":
    main()

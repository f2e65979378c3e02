"""Compare training speed on one GPU: its ceilings, four peers, a bar of plain torch, and ours. Below 10 minutes.

Run `python -m shardvit.launch.bench.gpu --json gpu.json`; it ends within `--minutes`, and the JSON is written after
each contender. One peer needs transformers, in the package's extra `test`. `--tiny` runs everything at toy size, also
on a CPU. Does not measure reading or several GPUs; two processes share the one.

Each contender is a fresh process that trains on the same batch from the same weights (`gpu_contenders`, `gpu_work`).
If its losses at steps 1 and 10 disagree with the bar's, it did other work and its row is void. The most important come
first, with the bar before and after ours. A turn may take all time but what later ones need at least. Then it is ended,
and its row keeps what it had measured by then.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardvit.launch.bench.gpu_meter import SO_FAR
from shardvit.launch.bench.gpu_report import GpuResults, Machine, report
from shardvit.launch.bench.measure import run_told

_CEILINGS = "ceilings"
MINUTES = 9.5
_LIBRARIES = ("torch", "timm", "deepspeed", "accelerate", "transformers", "triton")
_LEAST_SECONDS = 15.0  # start nothing with less time left
END_SECONDS = 10.0  # kept for a last process to leave, and for the tables
_GPU_NAME = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"


@dataclass(frozen=True)
class Turn:
    """One process to run."""

    what: str  # a contender, or "ceilings"
    size: str  # for the ceilings several, joined by +
    least_seconds: float  # to import, compile without a cache and time one block [estimated]; later turns leave them


FULL = (
    Turn("bar", "L/16@224 b256", 42),
    Turn("ours", "L/16@224 b256", 42),
    Turn(_CEILINGS, "L/16@224 b256+H/14@224 b128", 22),
    Turn("bar", "L/16@224 b256", 24),
    Turn("bar", "L/16@224 b64", 26),
    Turn("ours", "L/16@224 b64", 26),
    Turn("bar", "H/14@224 b128", 40),
    Turn("ours", "H/14@224 b128", 40),
    Turn("timm-compile", "L/16@224 b256", 60),
    Turn("deepspeed", "L/16@224 b256", 30),
    Turn("timm", "L/16@224 b256", 26),
    Turn("ours-2", "L/16@224 b64", 40),
    Turn("trainer", "L/16@224 b256", 50),
    Turn("ours", "L/16@384 b128", 34),
    Turn("ours", "L/16@224 b256, half the patches", 30),
    Turn("deepspeed", "H/14@224 b128", 28),
)
TINY = (
    Turn(_CEILINGS, "tiny", 300),
    *(
        Turn(what, "tiny", 600)
        for what in ("bar", "ours", "bar", "timm", "timm-compile", "trainer", "deepspeed", "ours-2")
    ),
)
_TINY_COURSE = {"blocks": 3, "block": 2, "singles": 2, "profiled": 1}


def main() -> None:
    """Measure; write the JSON and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="what was measured (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help=f"it ends within them (default: {MINUTES}; --tiny: no end)")
    parser.add_argument("--only", help="of the contenders and `ceilings`, these alone: bar,ours")
    parser.add_argument("--tiny", action="store_true", help="a toy's size, to see that everything runs")
    start, arguments = time.monotonic(), parser.parse_args()
    only = arguments.only and arguments.only.split(",")
    turns = [turn for turn in (TINY if arguments.tiny else FULL) if not only or turn.what in only]
    if not turns:
        parser.error(f"--only {arguments.only}: name some of {', '.join(sorted({turn.what for turn in FULL}))}")
    if not arguments.tiny and not _gpu_name():
        parser.error("torch finds no GPU here; --tiny runs everything at a toy's size on the CPU")
    minutes = arguments.minutes or (None if arguments.tiny else MINUTES)
    course = _TINY_COURSE if arguments.tiny else {}
    deadline = start + 60 * minutes - END_SECONDS if minutes else None
    print("\n".join(report(run(turns, course=course, out=arguments.json, deadline=deadline))))


def run(turns: Any, *, course: Mapping[str, int], out: Path, deadline: float | None) -> GpuResults:
    """Run the turns, writing `out` after each; the last ends by `deadline` (monotonic clock)."""
    results = GpuResults(Machine(_gpu_name() or None, dict(_versions())))
    with tempfile.TemporaryDirectory() as folder:
        for number, turn in enumerate(turns):
            left = math.inf if deadline is None else deadline - time.monotonic()
            limit = limit_seconds(turn, later=turns[number + 1 :], left=left)
            if left < _LEAST_SECONDS:
                found: dict[str, Any] = _failed(turn, "not run: the time was over")
            else:
                print(f"{turn.what}, {turn.size} ...", file=sys.stderr, flush=True)
                found = _take(turn, course=course, folder=Path(folder), limit=limit)
            if turn.what == _CEILINGS:
                results.ceilings = found
            else:
                results.outcomes.append(found)
            _write(out, results)
    return results


def limit_seconds(turn: Turn, *, later: Sequence[Turn], left: float) -> float:
    """The most that a turn may take of the time left: at least what it needs, else what later ones do not need."""
    if math.isinf(left):
        return turn.least_seconds
    return min(left, max(turn.least_seconds, left - sum(each.least_seconds for each in later)))


def _take(turn: Turn, *, course: Mapping[str, int], folder: Path, limit: float) -> dict[str, Any]:
    # Compiled code is cached for the same contender's next turn but not for others: each shows its own compile time.
    # One GPU: transformers' Trainer would take all that it sees.
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0],
        "TORCHINDUCTOR_CACHE_DIR": str(folder / turn.what),
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = _command(turn, course=course)
    told = run_told(
        lambda descriptor: [*command, str(descriptor)], env=environment, timeout_seconds=limit, samples_memory=False
    )
    if told.failure is None:
        return dict(told.marks["end"]["result"])
    if SO_FAR in told.marks:
        return {**told.marks[SO_FAR]["result"], "note": f"not all of it: {told.failure}"}
    return _failed(turn, told.failure)


def _command(turn: Turn, *, course: Mapping[str, int]) -> list[str]:
    module = "shardvit.launch.bench.gpu_contenders"
    return [sys.executable, "-m", module, turn.what, turn.size, json.dumps(dict(course))]


def _failed(turn: Turn, why: str) -> dict[str, Any]:
    if turn.what == _CEILINGS:
        return {"failure": why}
    return {"contender": turn.what, "size": turn.size, "measured": None, "failure": why}


def _write(out: Path, results: GpuResults) -> None:
    new = out.with_name(f"{out.name}.new")
    new.write_text(json.dumps(asdict(results), indent=1) + "\n", encoding="utf-8")
    new.replace(out)


def _gpu_name() -> str:
    """Ask in another process, so that this one holds no GPU memory; empty: no GPU."""
    return subprocess.run([sys.executable, "-c", _GPU_NAME], capture_output=True, text=True).stdout.strip()


def _versions() -> Iterator[tuple[str, str]]:
    for library in _LIBRARIES:
        try:
            yield library, version(library)
        except PackageNotFoundError:
            continue


if __name__ == "__main__":
    main()

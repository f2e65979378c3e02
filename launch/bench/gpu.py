"""Training speed on one GPU, below 10 minutes: this GPU's ceilings, four peers, a bar of plain torch, and ours.

Run `python -m launch.bench.gpu --json gpu.json` where there is a GPU; the table is printed, and the JSON written anew
after each contender, so that whatever ends it early leaves what was measured. transformers, for one of the peers, is in
the package's extra `test`. `--tiny` runs everything at a toy's size, on a CPU too: to see that it works.

Each contender is a fresh process that trains on the same batch from the same weights (`gpu_contenders`, `gpu_work`).
What it loses at steps 1 and 10 must agree with the bar's, or its row is void: then it did other work. Most important
first, the bar before and after ours; what the time does not suffice for is said. Not measured: reading, several GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from launch.bench.gpu_report import GpuResults, Machine, report

_CEILINGS = "ceilings"
_LIBRARIES = ("torch", "timm", "deepspeed", "accelerate", "transformers", "triton")
_LEAST_SECONDS = 15.0  # with less time left nothing is begun
_LAST_WORDS = 400  # characters


@dataclass(frozen=True)
class Turn:
    """One process; `limit_seconds`: after which it is ended, and the next begins."""

    what: str  # a contender, or the ceilings
    size: str  # of the ceilings: several, joined by +
    limit_seconds: float


FULL = (
    Turn(_CEILINGS, "L/16@224 b256+H/14@224 b128", 60),
    Turn("bar", "L/16@224 b256", 80),
    Turn("ours", "L/16@224 b256", 80),
    Turn("bar", "L/16@224 b256", 60),
    Turn("bar", "L/16@224 b64", 50),
    Turn("ours", "L/16@224 b64", 50),
    Turn("bar", "H/14@224 b128", 80),
    Turn("ours", "H/14@224 b128", 80),
    Turn("timm-compile", "L/16@224 b256", 80),
    Turn("deepspeed", "L/16@224 b256", 70),
    Turn("timm", "L/16@224 b256", 70),
    Turn("trainer", "L/16@224 b256", 90),
    Turn("ours", "L/16@384 b128", 70),
    Turn("ours", "L/16@224 b256, half the patches", 60),
    Turn("deepspeed", "H/14@224 b128", 70),
    Turn("timm-compile", "H/14@224 b128", 80),
)
TINY = (
    Turn(_CEILINGS, "tiny", 300),
    *(Turn(what, "tiny", 600) for what in ("bar", "ours", "bar", "timm", "timm-compile", "trainer", "deepspeed")),
)
_FULL_COURSE: dict[str, int] = {}
_TINY_COURSE = {"blocks": 3, "block": 2, "singles": 2, "profiled": 1}


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="what was measured (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="nothing is begun after them (default: 9.5; --tiny: no end)")
    parser.add_argument("--only", help="of the contenders and `ceilings`, these alone: bar,ours")
    parser.add_argument("--tiny", action="store_true", help="a toy's size, to see that everything runs")
    arguments = parser.parse_args()
    turns = [turn for turn in (TINY if arguments.tiny else FULL) if _wanted(turn, only=arguments.only)]
    if not turns:
        parser.error(f"--only {arguments.only}: name some of {', '.join(sorted({turn.what for turn in FULL}))}")
    if not arguments.tiny and not has_gpu():
        parser.error("torch finds no GPU here; --tiny runs everything at a toy's size on the CPU")
    minutes = arguments.minutes or (None if arguments.tiny else 9.5)
    course = _TINY_COURSE if arguments.tiny else _FULL_COURSE
    results = run(
        turns, course=course, out=arguments.json, deadline=time.monotonic() + 60 * minutes if minutes else None
    )
    print("\n".join(report(results)))


def run(turns: Any, *, course: Mapping[str, int], out: Path, deadline: float | None) -> GpuResults:
    """Take turns; `out` is written after each. No turn begins after `deadline` (of the monotonic clock)."""
    results = GpuResults(machine=_machine())
    with tempfile.TemporaryDirectory() as folder:
        for number, turn in enumerate(turns):
            left = turn.limit_seconds if deadline is None else min(turn.limit_seconds, deadline - time.monotonic())
            if left < _LEAST_SECONDS:
                found: dict[str, Any] = _failed(turn, "not run: the time was over")
            else:
                print(f"{turn.what}, {turn.size} ...", file=sys.stderr, flush=True)
                found = _take(turn, course=course, folder=Path(folder), number=number, limit_seconds=left)
            results.add(turn.what == _CEILINGS, found)
            _write(out, results)
    return results


def has_gpu() -> bool:
    """Asked in a process of its own, so that this one keeps nothing of the GPU's memory."""
    asks = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", asks], check=False).returncode == 0


def _take(turn: Turn, *, course: Mapping[str, int], folder: Path, number: int, limit_seconds: float) -> dict[str, Any]:
    """Read what the process wrote, or why it wrote nothing."""
    out = folder / f"{number}.json"
    command = [sys.executable, "-m", "launch.bench.gpu_child", turn.what, turn.size, json.dumps(dict(course)), str(out)]
    # Compiled code is kept for the same contender's next turn, and from the others: each shows what it compiles.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / turn.what), "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            command, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            return _failed(turn, f"ended after {limit_seconds:.0f} s")
        finally:
            _end(process)
        if out.exists():
            return json.loads(out.read_text(encoding="utf-8"))
        said.seek(0)
        lines = [line.strip() for line in said.read().splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line] or lines or ["it said nothing"]
        return _failed(turn, f"exit code {process.returncode}: {errors[-1][:_LAST_WORDS]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and its compiler's processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _failed(turn: Turn, why: str) -> dict[str, Any]:
    if turn.what == _CEILINGS:
        return {"failure": why}
    return {"contender": turn.what, "size": turn.size, "measured": None, "failure": why}


def _wanted(turn: Turn, *, only: str | None) -> bool:
    return only is None or turn.what in only.split(",")


def _write(out: Path, results: GpuResults) -> None:
    beside = out.with_name(f"{out.name}.new")
    beside.write_text(json.dumps(asdict(results), indent=1) + "\n", encoding="utf-8")
    beside.replace(out)


def _machine() -> Machine:
    asks = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    name = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=False).stdout.strip()
    return Machine(gpu=name or None, versions=dict(_versions()))


def _versions() -> Iterator[tuple[str, str]]:
    for library in _LIBRARIES:
        try:
            yield library, version(library)
        except PackageNotFoundError:
            continue


if __name__ == "__main__":
    main()

"""Measure `shardvit report` on long runs: seconds, memory and page size, for one run and for three.

Run `python -m shardvit.launch.bench.report_page`; output in records/report_page.txt. Run folders are synthetic: a stage
of 100,000 points with all that training logs, a spike, gaps, restarts, checkpoints, and pictures of noise, which
compresses worst. Targets: below 20 s of CPU time, below 5 MB, and the spike is on the page.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardvit.launch.bench.measure import children_cpu_seconds, setting
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.vocabulary import METRICS
from shardvit.pipeline.runs.run_folder import RunFolder

_MOST_SECONDS, _MOST_BYTES = 20.0, 5_000_000
_BATCH = 64
_SPIKE = 87.654  # the loss of a single row


@dataclass(frozen=True)
class PageCost:
    """The cost of one page."""

    what: str
    seconds: float
    cpu_seconds: float
    peak_mb: float
    page_bytes: int
    has_spike: bool


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Seconds and bytes of the page of long runs.")
    parser.add_argument("--points", type=int, default=100_000, help="of each run's curve (%(default)s)")
    parser.add_argument("--pictures", type=int, default=12, help="photographs of each run (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            long_run(Path(folder), f"run{number}", points=options.points, pictures=options.pictures, seed=number)
            for number in range(3)
        ]
        pages = [measured("one run", runs[:1]), measured("three runs", runs)]
    print(f"{setting()}, load {os.getloadavg()[0]:.0f}; {options.points:,} points a run")
    print(f"\n{'':12}{'seconds':>10}{'CPU s':>10}{'peak MB':>10}{'page MB':>10}  spike")
    for page in pages:
        figures = f"{page.seconds:10.1f}{page.cpu_seconds:10.1f}{page.peak_mb:10.0f}{page.page_bytes / 1e6:10.2f}"
        print(f"{page.what:12}{figures}  {'on the page' if page.has_spike else 'LOST'}")
    met = all(page.cpu_seconds < _MOST_SECONDS and page.page_bytes < _MOST_BYTES and page.has_spike for page in pages)
    print(f"\ntargets, {_MOST_SECONDS:g} s of CPU and {_MOST_BYTES / 1e6:g} MB: {'met' if met else 'MISSED'}")


def measured(what: str, runs: list[RunFolder]) -> PageCost:
    """Make a page with the command in a fresh process."""
    page = runs[0].runs_root / "page.html"
    before, begun = children_cpu_seconds(), time.monotonic()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "shardvit.launch.cli",
            "report",
            "--no-draw",
            "--output",
            page,
            *(run.path for run in runs),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    seconds, cpu = time.monotonic() - begun, children_cpu_seconds() - before
    peak_kb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    html = page.read_text(encoding="utf-8")
    return PageCost(what, seconds, cpu, peak_kb / 1e3, len(html.encode()), f"{_SPIKE}" in html)


def long_run(root: Path, name: str, *, points: int, pictures: int, seed: int) -> RunFolder:
    """Make a synthetic run with a long stage."""
    folder = RunFolder(root, name)
    folder.open(load_recipe("digits", overrides=[f"name={name}", f"seed={seed}"]))
    folder.update("pretrain", state="running", images_seen=_BATCH * points, seconds=float(points))
    random = np.random.default_rng(seed)
    trained = [key for key in METRICS if not key.startswith(("val/", "model/", "eval/"))]
    noise = random.normal(size=(points, len(trained)))
    lines: list[dict[str, object]] = []
    for number in range(points):
        step = number + 1
        values = {key: float(each) for key, each in zip(trained, noise[number], strict=True)}
        values["train/loss"] = 2 * math.exp(-3 * number / points) + 0.02 * values["train/loss"]
        if number == points // 3:
            values["train/loss"] = _SPIKE
        if number % 9000 == 8999:
            values["train/loss"] = math.nan
        lines.append({"step": step, "images_seen": _BATCH * step, "time": 1.76e9 + step, "metrics": values})
        if step % 1000 == 0:
            held_out = {"val/loss": 1.0 - number / points, "val/top1": number / points}
            lines.append({**lines[-1], "metrics": held_out})
    stage = folder.stage("pretrain")
    _write_lines(stage / "metrics.jsonl", lines)
    events = [
        {"time": 1.76e9 + step, "step": step, "images_seen": _BATCH * step, "kind": kind, "text": f"{kind} {step}"}
        for step in range(0, points, max(1, points // 500))
        for kind in (("start", "checkpoint") if step % (points // 10) == 0 else ("checkpoint",))
    ]
    _write_lines(stage / "events.jsonl", events)
    _photographs(stage, count=pictures, random=random)
    return folder


def _write_lines(path: Path, lines: Sequence[object]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _photographs(stage: Path, *, count: int, random: np.random.Generator) -> None:
    """Write pictures of incompressible pixels, at two steps each."""
    from PIL import Image

    for number in range(count):
        own = stage / "pictures" / f"photographs_{number}"
        own.mkdir(parents=True)
        for step in (100, 200):
            pixels = random.integers(0, 256, (800, 1280, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(own / f"step-{step:08d}.png", compress_level=1)
            (own / f"step-{step:08d}.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
            words = {"title": f"Photographs {number}", "caption": "noise", "alt": "noise", "group": "data"}
            (own / f"step-{step:08d}.json").write_text(json.dumps({**words, "step": step}))


if __name__ == "__main__":
    main()

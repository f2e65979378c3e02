"""How long a run takes from the start of its process to its first step: fresh, and going on from a checkpoint.

Run `python -m launch.bench.resume_start`; records/resume_start.txt has what it printed. `shardvit run` on the recipe
`digits`, pre-training, two processes; key=value arguments change the recipe, a larger model for instance.

A checkpoint is made first. Then fresh starts and resumed ones take turns, each in a folder of its own, and each is
killed after its first step; the first turn of both, which reads the libraries from disk, is not counted. The step's
time is the one in metrics.jsonl. Target that the project sets itself: a resumed start within 1.5 x a fresh one, the
median of the rounds' ratios. Costs 2 to 5 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import psutil

from data_shards.packing.pack import pack
from launch.bench.measure import median_ratio
from pipeline.runs.metrics_log import iter_metrics

_TARGET = 1.5
_SAVED_STEP = 20
_PATIENCE_SECONDS = 600.0
_MIB = 2**20


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Seconds from process start to the first step, fresh and resumed.")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe digits")
    parser.add_argument("--rounds", type=int, default=7, help="starts of each kind (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardvit-bench-") as name:
        top = Path(name)
        pack("digits", top / "shards", classes=tuple("0123456"), holdout=0.2, report=lambda text: None)
        overrides = [
            f"stages.pretrain.train={top / 'shards' / 'train'}",
            f"stages.pretrain.eval={top / 'shards' / 'val'}",
            *("stages.swap_head=null", "stages.finetune=null", "stages.pretrain.log_every=1 steps"),
            f"stages.pretrain.save_every={_SAVED_STEP} steps",
            *options.overrides,
        ]
        saved = top / "saved"
        seconds_to_step(_SAVED_STEP, runs=saved, overrides=overrides, until_saved=True)
        checkpoint = next((saved / "digits" / "pretrain" / "checkpoints").glob("step-*"))
        num_bytes = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
        fresh: list[float] = []
        resumed: list[float] = []
        for _ in range(options.rounds + 1):
            fresh.append(seconds_to_step(1, runs=top / "fresh", overrides=overrides))
            shutil.rmtree(top / "fresh")
            shutil.copytree(saved, top / "resumed")
            first = int(checkpoint.name.removeprefix("step-")) + 1
            resumed.append(seconds_to_step(first, runs=top / "resumed", overrides=overrides))
            shutil.rmtree(top / "resumed")
    for line in report(fresh[1:], resumed[1:], overrides=options.overrides, checkpoint_bytes=num_bytes):
        print(line)


def seconds_to_step(step: int, *, runs: Path, overrides: Sequence[str], until_saved: bool = False) -> float:
    """Start `shardvit run`, wait for the step to be logged, and kill everything; seconds from start to step."""
    begin = time.time()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "launch.cli", "run", "digits", *overrides),
                *("--stage", "pretrain", "--runs", str(runs)),
            ],
            env={**os.environ, "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"},  # nobody there: not what is measured
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        stage = runs / "digits" / "pretrain"
        try:
            while True:
                rows = iter_metrics(stage / "metrics.jsonl")  # the killed attempt's later ones are there, too
                reached = [row.time for row in rows if row.step == step and row.time > begin]
                if reached and (not until_saved or list((stage / "checkpoints").glob("step-*"))):
                    return reached[0] - begin
                if process.poll() is not None or time.time() - begin > _PATIENCE_SECONDS:
                    output.seek(0)
                    raise RuntimeError(f"step {step} was not reached:\n{output.read()}")
                time.sleep(0.05)
        finally:
            if process.poll() is None:
                tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                for member in tree:
                    member.kill()
                process.wait()
                psutil.wait_procs(tree)


def report(
    fresh: Sequence[float], resumed: Sequence[float], *, overrides: Sequence[str], checkpoint_bytes: int
) -> list[str]:
    """The table and whether the target is met."""
    ratio = median_ratio(resumed, fresh)
    rows = {"fresh": fresh, "resumed": resumed}
    return [
        f"Python {platform.python_version()}, torch {version('torch')}, deepspeed {version('deepspeed')}, "
        f"{os.cpu_count()} cores",
        f"{' '.join(['recipe digits', *overrides])}: 2 processes, checkpoint of {checkpoint_bytes / _MIB:.1f} MiB, "
        f"{len(fresh)} rounds",
        "",
        f"{'seconds from process start to step':38}{'median':>10}{'least':>10}{'worst':>10}",
        *(
            f"{name:38}{statistics.median(values):10.2f}{min(values):10.2f}{max(values):10.2f}"
            for name, values in rows.items()
        ),
        "",
        f"resumed to fresh, median of the rounds' ratios: {ratio:.2f}, target {_TARGET}: "
        f"{'met' if ratio <= _TARGET else 'MISSED'}",
    ]


if __name__ == "__main__":
    main()

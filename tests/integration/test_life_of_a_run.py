"""What may be taken from a run while it is at work: its output, its folder, its record.

Real processes, one rank each: `shardvit run` once, else what every launcher starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from data_shards.packing.pack import pack
from pipeline.checkpoint.store import damage_of
from pipeline.runs.logs import read_metrics
from tests.small_recipe import small_recipe, small_stage, write_recipe

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 240.0
STEPS = 30
CLI = ("-m", "launch.cli", "run", "recipe.yaml")
RANK = ("-m", "launch.train", "recipe.yaml", "--stage", "pretrain")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "digits"
    pack("digits", out, classes=("0", "1"), holdout=0.2, samples_per_shard=100, report=lambda text: None)
    return out


@pytest.fixture
def folder(tmp_path: Path, shards: Path) -> Path:
    """A working folder with a recipe."""
    stage = small_stage(shards, duration=f"{STEPS} steps", log_every="1 step", save_every="10 steps")
    write_recipe(
        tmp_path / "recipe.yaml", small_recipe("law", processes=1, engine={"precision": "fp32"}, pretrain_=stage)
    )
    return tmp_path


def start(folder: Path, arguments: Sequence[str], *, shell: str = "", **streams: Any) -> subprocess.Popen[str]:
    """Start a command; `shell` are redirections of its own."""
    return subprocess.Popen(
        ["bash", "-c", f'exec "$0" "$@" {shell}', sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"},
        stdin=subprocess.DEVNULL,
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **streams},
    )


def stage(folder: Path) -> Path:
    return folder / "runs" / "law" / "pretrain"


def is_complete(folder: Path) -> bool:
    """Whether the run is done, and its metrics tell every step."""
    done = json.loads((stage(folder) / "stage.json").read_text())["state"] == "done"
    steps = [row.step for row in read_metrics(stage(folder) / "metrics.jsonl") if "train/loss" in row.metrics]
    return done and steps == list(range(1, STEPS + 1))


def test_a_reader_that_leaves_after_three_lines_ends_nothing(folder: Path) -> None:
    """`shardvit run ... 2>&1 | head -3`, through the supervisor and the launcher."""
    process = start(folder, CLI)
    assert process.stdout
    for _ in range(3):
        assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=PATIENCE_SECONDS) == 0
    assert is_complete(folder)


def test_no_output_at_all_ends_nothing(folder: Path) -> None:
    """A rank whose standard output is on a full disk, and whose standard error is closed."""
    process = start(folder, RANK, shell=">/dev/full 2>&-")
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert is_complete(folder)


def test_a_renamed_folder_is_told_as_gone_and_stays_whole_under_its_new_name(folder: Path) -> None:
    """That it goes on when it is back is a row of tests/faults."""
    process = start(folder, (*CLI, "stages.pretrain.duration=100000 steps", "stages.pretrain.log_every=500 steps"))
    run, elsewhere = folder / "runs" / "law", folder / "runs" / "kept"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not list(run.glob("pretrain/checkpoints/step-*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    run.rename(elsewhere)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 2, output
    assert not run.exists()  # nothing was made in its place
    assert output.count("is gone: it was deleted or renamed") == 1 and "Traceback" not in output, output
    assert str(run.relative_to(folder)) in output and "taken over" not in output
    checkpoints = list(elsewhere.glob("pretrain/checkpoints/step-*"))
    assert checkpoints and all(damage_of(checkpoint) == "" for checkpoint in checkpoints)
    record = json.loads((elsewhere / "pretrain" / "stage.json").read_text())
    assert record["state"] == "running"

"""`shardvit run --max-restarts`: a real rank is killed, and the run comes to its end by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from data_shards.packing.pack import pack

ROOT = Path(__file__).resolve().parents[2]
STEPS = 80
PATIENCE_SECONDS = 240.0


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "digits"
    pack("digits", out, classes=("0", "1"), holdout=0.2, samples_per_shard=100, report=lambda text: None)
    return out


def start(folder: Path, shards: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """`shardvit run` of a tiny recipe, in `folder`; what it says goes to output.txt there."""
    stage = {
        "train": str(shards / "train"),
        "eval": str(shards / "val"),
        "image_size": 8,
        "global_batch_size": 16,
        "duration": f"{STEPS} steps",
        "optimizer": {"name": "adamw", "lr": 0.003},
        "save_every": "10 steps",
    }
    recipe = {
        "name": "again",
        "processes": 2,
        "model": {"width": 16, "depth": 1, "heads": 2, "patch_size": 4},
        "engine": {"precision": "fp32", "max_micro_batch_size": 8},
        "stages": {"pretrain": stage},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "launch.cli", "run", "recipe.yaml", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def last_saved(folder: Path) -> int:
    path = folder / "runs" / "again" / "pretrain" / "stage.json"
    return json.loads(path.read_text())["last_saved_step"] if path.exists() else 0


def kill_a_rank(process: subprocess.Popen[bytes], folder: Path, *, from_step: int) -> None:
    """Kill -9 of one of the two, once `from_step` is saved."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while last_saved(folder) < from_step:
        assert process.poll() is None, (folder / "output.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    ranks = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if child.cmdline()[1:4] == ["-u", "-m", "launch.train"]
    ]
    ranks[-1].kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_whose_rank_is_killed_comes_to_its_end_by_itself(tmp_path: Path, shards: Path):
    process = start(tmp_path, shards, "--max-restarts", "3")
    try:
        kill_a_rank(process, tmp_path, from_step=10)
        process.wait(timeout=PATIENCE_SECONDS)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    output = (tmp_path / "output.txt").read_text()
    assert process.returncode == 0, output
    assert "restart 1 of 3 from step" in output and "restart 2" not in output and "Traceback" not in output
    assert "a process was killed by signal 9" in output
    record = json.loads((tmp_path / "runs" / "again" / "pretrain" / "stage.json").read_text())
    assert record["state"] == "done" and record["last_saved_step"] == STEPS
    assert not list((tmp_path / "runs" / "again").glob(".rendezvous*"))

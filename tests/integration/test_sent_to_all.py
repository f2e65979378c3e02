"""A real run that is killed with everything it started, and run again: each service has what metrics.jsonl has."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from shardvit.pipeline.runs.logs import read_metrics
from tests.faults.harness import fault_variables
from tests.pipeline.tracking.read_back import curves_of, tensorboard_curves, wandb_curves, wandb_history

RECIPE = """
name: small
processes: 1
pictures: off
model: {width: 32, depth: 1, heads: 2, patch_size: 4}
data: {workers: 0}
engine: {precision: fp32}
tracking: {to: [mlflow, tensorboard, wandb], log_model: false}
stages:
  pretrain:
    train: shards/train
    eval: shards/val
    image_size: 16
    global_batch_size: 16
    duration: 4000 steps
    log_every: 5 steps
    eval_every: 1000 steps
    save_every: 400 steps
    optimizer: {name: adamw, lr: 0.001}
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_killed_run_that_is_run_again_is_whole_in_each_service(tmp_path: Path):
    from mlflow.tracking import MlflowClient

    environ = {name: text for name, text in os.environ.items() if not name.startswith(("MLFLOW_", "WANDB_"))}
    environ |= {**fault_variables(()), "WANDB_MODE": "offline"}
    command = [sys.executable, "-P", "-m", "shardvit.launch.cli"]
    (tmp_path / "my.yaml").write_text(RECIPE)
    subprocess.run([*command, "pack", "digits", "shards", "--holdout", "0.2"], cwd=tmp_path, env=environ, check=True)
    stage = tmp_path / "runs" / "small" / "pretrain"

    def sent(name: str) -> int:
        file = stage / f"{name}.json"
        return int(json.loads(file.read_text())["sent_rows"]) if file.exists() else 0

    # Rank 0 stops: W&B may take half a minute to start, by when training would be over.
    fault = {"action": "stop", "point": "between_steps", "rank": 0, "step": 1000, "once": str(tmp_path / "struck")}
    faulty = environ | fault_variables([fault])
    first = subprocess.Popen([*command, "run", "my.yaml"], cwd=tmp_path, env=faulty, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 240
    while min(map(sent, ("tensorboard", "wandb"))) < 60:
        assert first.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    for process in [*psutil.Process(first.pid).children(recursive=True), psutil.Process(first.pid)]:
        process.kill()
    first.wait()
    assert len(read_metrics(stage / "metrics.jsonl")) < 800
    done = subprocess.run([*command, "run", "my.yaml"], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "not sent" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith(("wandb", "W&B", "TensorBoard"))] == [
        "W&B: offline: `wandb sync runs/small/wandb/offline-run-*` uploads it"
    ]
    rows = read_metrics(stage / "metrics.jsonl")
    assert [row.step for row in rows if "train/loss" in row.metrics] == list(range(5, 4001, 5))
    assert tensorboard_curves(stage / "tensorboard") == curves_of(rows, dtype=np.float32)
    assert wandb_curves(wandb_history(stage.parent / "wandb")) == curves_of(rows)
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    points = client.get_metric_history(json.loads((stage / "mlflow.json").read_text())["run_id"], "train/loss")
    latest = {each.step: each.value for each in sorted(points, key=lambda each: each.timestamp)}
    assert latest == {row.step: row.metrics["train/loss"] for row in rows if "train/loss" in row.metrics}

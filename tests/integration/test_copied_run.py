"""A run that continues in a hard-linked copy of all runs, MLflow's database with them: the original stays as it was.

Real processes: `shardvit run`, stopped after a checkpoint, copied by `cp -rl`, and gone on with in the copy.
"""

import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from shardvit.data_shards.packing.pack import pack
from tests.small_recipe import small_recipe, small_stage, write_recipe

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 240.0


def start(work: Path, runs: str, preloaded: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with (work / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "shardvit.launch.cli", "run", "recipe.yaml", "--runs", runs],
            cwd=work,
            env={**os.environ, "PYTHONPATH": str(ROOT), **preloaded},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def state_of(top: Path) -> dict[str, tuple[int, int, str]]:
    """Of each file its inode, its time and its content."""
    return {
        str(path.relative_to(top)): (
            path.stat().st_ino,
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in sorted(top.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
def test_going_on_in_a_hard_linked_copy_leaves_the_original_as_it_was(
    tmp_path: Path, preloaded_environment: Mapping[str, str]
) -> None:
    pack("digits", tmp_path / "shards", classes=("0", "1"), holdout=0.2, report=lambda text: None)
    stage = small_stage(duration="300 steps", log_every="5 steps", save_every="20 steps")
    engine = {"backend": "accelerate", "precision": "fp32"}
    recipe = small_recipe("law", processes=1, engine=engine, tracking={"log_model": False}, pretrain_=stage)
    write_recipe(tmp_path / "recipe.yaml", recipe)
    first = start(tmp_path, "runs", preloaded_environment)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not list(tmp_path.glob("runs/law/pretrain/checkpoints/step-*")):
        assert first.poll() is None and time.monotonic() < deadline, (tmp_path / "output.txt").read_text()
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=PATIENCE_SECONDS) == 75, (tmp_path / "output.txt").read_text()
    (tmp_path / "runs/law/pretrain/ranks/stack-rank-0.txt").touch()
    before = state_of(tmp_path / "runs")
    assert {"mlflow.db", "law/pretrain/metrics.jsonl", "law/pretrain/ranks/rank-0.json"} <= before.keys()

    subprocess.run(["cp", "-rl", "runs", "elsewhere"], cwd=tmp_path, check=True)
    assert start(tmp_path, "elsewhere", preloaded_environment).wait(timeout=PATIENCE_SECONDS) == 0, (
        tmp_path / "output.txt"
    ).read_text()
    assert state_of(tmp_path / "runs") == before

    copy = tmp_path / "elsewhere"
    assert json.loads((copy / "law/pretrain/stage.json").read_text())["state"] == "done"
    with closing(sqlite3.connect(copy / "mlflow.db")) as database:
        runs = dict(database.execute("select run_uuid, artifact_uri from runs").fetchall())
        steps = database.execute("select count(distinct step) from metrics where key = 'train/loss'").fetchone()
    ids = [json.loads((copy / "law" / at / "mlflow.json").read_text())["run_id"] for at in ("", "pretrain")]
    assert runs == {run_id: f"{copy.as_uri()}/mlartifacts/{run_id}/artifacts" for run_id in ids}
    assert steps == (60,)
    events = (copy / "mlartifacts" / ids[1] / "artifacts/events.jsonl").read_text()
    assert '"done"' in events and events == (copy / "law/pretrain/events.jsonl").read_text()

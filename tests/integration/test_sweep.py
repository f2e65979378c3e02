"""A sweep in real processes: killed in the middle of a point and typed again, and the same as ordinary runs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardvit.data_shards.packing.pack import pack
from shardvit.pipeline.runs.logs import read_metrics
from shardvit.pipeline.runs.run_folder import RunFolder
from tests.faults.harness import Fault, fault_variables
from tests.small_recipe import small_recipe, small_stage, write_recipe

PATIENCE_SECONDS = 900.0
SWEEP = ("sweep", "recipe.yaml", "finetune.optimizer.lr=0.01,0.3", "--hold-out", "10%")

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A working folder with shards and a recipe of two stages."""
    shards = tmp_path / "shards"
    pack("digits", shards, classes=("0", "1"), holdout=0.2, samples_per_shard=100, report=lambda text: None)
    keys = {"optimizer": {"name": "sgd", "lr": 0.1}, "dropout": 0.1, "log_every": "1 step", "save_every": "5 steps"}
    recipe = small_recipe(
        "law",
        processes=1,
        engine={"precision": "fp32"},
        pretrain_=small_stage(duration="6 steps", save_every="2 steps"),
        swap_head_={},
        finetune_=small_stage(duration="40 steps", eval_every="0 steps", **keys),
    )
    write_recipe(tmp_path / "recipe.yaml", recipe)
    return tmp_path


def start(work: Path, *arguments: str, faults: Sequence[Fault] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shardvit.launch.cli", *arguments],
        cwd=work,
        env={**os.environ, **fault_variables(faults)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output = process.communicate(timeout=PATIENCE_SECONDS)[0]
    return process.returncode, output


def wait_for(condition: object, *, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():  # pyright: ignore[reportCallIssue]
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's, of its own libraries
def test_killed_in_the_middle_it_goes_on_and_equals_ordinary_runs(work: Path):
    root = work / "runs" / "law-sweep"
    log = root / "lr-0.01" / "finetune" / "metrics.jsonl"
    fault = {"action": "kill_all", "point": "between_steps", "rank": 0, "step": 8, "once": str(work / "struck")}
    code, output = finish(start(work, *SWEEP, faults=[fault]))
    assert code == -signal.SIGKILL, output
    assert read_metrics(log)[-1].step <= 8
    (pretrain,) = root.glob("pretrain-*")
    weights_written = (pretrain / "pretrain" / "model" / "model.safetensors").stat().st_mtime_ns

    code, output = finish(start(work, *SWEEP))
    assert code == 0, output
    tree = json.loads((root / "sweep.json").read_text())
    assert [one["state"] for one in tree["points"]] == ["done", "done"] and tree["final"]["state"] == "done"
    scores = {one["name"]: (one["score"], -one["loss"]) for one in tree["points"]}
    assert tree["chosen"] == max(scores, key=lambda name: scores[name]) and "chosen" in output
    assert (pretrain / "pretrain" / "model" / "model.safetensors").stat().st_mtime_ns == weights_written
    assert [row.step for row in read_metrics(log) if "train/loss" in row.metrics] == list(range(1, 41))

    lr = tree["points"][0]["values"]["finetune.optimizer.lr"]
    parts = [f"finetune.{key}={{shards: shards/train, part: {part}, hold_out: 0.1}}" for key, part in PARTS]
    parts += ["stages.pretrain=null", f"stages.swap_head.model={pretrain / 'pretrain' / 'model'}", "name=plain"]
    code, output = finish(start(work, "run", "recipe.yaml", f"finetune.optimizer.lr={lr}", *parts))
    assert code == 0, output
    ours = RunFolder(runs_root=root, name="lr-0.01").record("finetune")
    plain = RunFolder(runs_root=work / "runs", name="plain").record("finetune")
    assert ours.model_digest == plain.model_digest and ours.results == plain.results
    assert ours.results["val/images"] == round(0.1 * tree["final"]["images"] * 4)

    tree_of_runs = mlflow_tree(work / "runs" / "mlflow.db")
    assert tree_of_runs["law-sweep"] == {pretrain.name, "lr-0.01", "lr-0.3", "final"}
    of_point = tree_of_runs["lr-0.01"]
    assert {name.partition("-")[0] for name in of_point} == {"swap_head", "finetune"}
    assert all(name.endswith("-lr-0.01") for name in of_point)
    assert tree_of_runs[""] == {"law-sweep", "plain"}


PARTS = (("train", "rest"), ("eval", "held_out"))


def mlflow_tree(database: Path) -> dict[str, set[str]]:
    """Name of a run ("": none) -> the names of its children."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{database}")
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()], max_results=1000)
    names = {run.info.run_id: str(run.info.run_name) for run in runs}
    assert len(set(names.values())) == len(names), "a run stands twice in MLflow"
    found: dict[str, set[str]] = {}
    for run in runs:
        found.setdefault(names.get(run.data.tags.get("mlflow.parentRunId", ""), ""), set()).add(names[run.info.run_id])
    return found


def test_ctrl_c_saves_and_the_same_command_goes_on(work: Path):
    root = work / "runs" / "law-sweep"
    log = root / "lr-0.01" / "finetune" / "metrics.jsonl"
    process = start(work, *SWEEP, "finetune.duration=5000 steps")
    wait_for(lambda: log.exists() and any(row.step >= 8 for row in read_metrics(log)), process=process)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 75, output
    tree = json.loads((root / "sweep.json").read_text())
    assert [one["state"] for one in tree["points"]] == ["begun", "new"] and tree["chosen"] is None
    assert RunFolder(runs_root=root, name="lr-0.01").record("finetune").last_saved_step >= 8

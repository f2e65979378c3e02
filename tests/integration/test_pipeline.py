"""The three stages by the real command, with real processes and a real MLflow store, on a few digits."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardvit.data_shards.packing.pack import pack
from shardvit.model.saved.model_folder import load_model
from shardvit.pipeline.runs.logs import read_metrics
from tests.left_behind import mlflow_states, surprises
from tests.small_recipe import SMALL, curve, small_recipe, small_stage, write_recipe

Run = Callable[..., subprocess.CompletedProcess[str]]
STAGES = ("pretrain", "swap_head", "finetune")


def train_stage(shards: Path, image_size: int, duration: str, **keys: Any) -> dict[str, Any]:
    every = {"log_every": "4 steps", "eval_every": "50%", "save_every": "8 steps"}
    return small_stage(shards, image_size=image_size, duration=duration, **every, **keys)


@pytest.fixture(scope="module")
def run(run_preloaded: Callable[..., subprocess.CompletedProcess[str]]) -> Run:
    return lambda folder, *overrides: run_preloaded("run", "recipe.yaml", *overrides, cwd=folder, timeout_seconds=500)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, run: Run) -> Path:
    """A folder in which a whole pipeline has run."""
    folder = tmp_path_factory.mktemp("pipeline")
    quiet = lambda text: None  # noqa: E731
    pack("digits", folder / "many", classes=("0", "1", "2", "3"), holdout=0.2, samples_per_shard=100, report=quiet)
    pack("digits", folder / "few", classes=("8", "9"), holdout=0.3, report=quiet)
    recipe = small_recipe(
        "three",
        model=SMALL | {"depth": 2},
        processes=2,
        pretrain_=train_stage(folder / "many", 8, "16 steps", loss="sigmoid", head_bias=-2.0),
        swap_head_={},
        finetune_=train_stage(
            folder / "few", 12, "12 steps", optimizer={"name": "sgd", "lr": 0.01}, label_smoothing=0.1
        ),
    )
    write_recipe(folder / "recipe.yaml", recipe)
    done = run(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_stage_is_done_and_says_what_it_saw(finished):
    records = {name: json.loads((finished / "runs/three" / name / "stage.json").read_text()) for name in STAGES}
    assert {record["state"] for record in records.values()} == {"done"}
    assert records["pretrain"]["images_seen"] == 16 * 16
    assert records["finetune"]["images_seen"] == 12 * 16
    assert records["finetune"]["inputs"]["weights"] == records["swap_head"]["model_digest"]
    assert records["swap_head"]["inputs"]["weights"] == records["pretrain"]["model_digest"]
    assert 0 <= records["finetune"]["results"]["val/top1"] <= 1


@pytest.mark.slow
def test_in_processes_of_its_own_each_stage_has_the_same_result_to_the_last_bit(
    finished: Path, run: Run, tmp_path: Path
):
    """`finished` has run all three in the same two processes, started once."""
    (tmp_path / "recipe.yaml").write_text((finished / "recipe.yaml").read_text())
    for stage in STAGES:
        alone = run(tmp_path, "--stage", stage)
        assert alone.returncode == 0, alone.stdout + alone.stderr
    for stage in STAGES:
        ours, theirs = (folder / "runs/three" / stage for folder in (finished, tmp_path))
        assert (ours / "model/model.safetensors").read_bytes() == (theirs / "model/model.safetensors").read_bytes()
        assert curve(ours) == curve(theirs) != []


def test_the_head_is_swapped_for_zeros_and_the_trunk_is_untouched(finished):
    _, before = load_model(finished / "runs/three/pretrain/model")
    meta, after = load_model(finished / "runs/three/swap_head/model")
    assert meta.class_names == ("8", "9") and meta.head == "linear"
    assert {name for name in before if name.startswith("head.")} == {
        "head.pre_logits.weight",
        "head.pre_logits.bias",
        "head.logits.weight",
        "head.logits.bias",
    }
    assert not after["head.weight"].any() and not after["head.bias"].any()
    assert after["head.weight"].shape == (2, 16)
    trunk = [name for name in before if not name.startswith("head.")]
    assert all(torch.equal(before[name], after[name]) for name in trunk)


def test_fine_tuning_has_a_longer_sequence_and_trained_weights(finished):
    _, before = load_model(finished / "runs/three/swap_head/model")
    meta, after = load_model(finished / "runs/three/finetune/model")
    assert before["pos_embed"].shape == (1, 1 + 2 * 2, 16)
    assert after["pos_embed"].shape == (1, 1 + 3 * 3, 16)
    assert meta.image_size == 12
    assert after["head.weight"].any()
    assert not torch.equal(before["blocks.0.mlp.fc1.weight"], after["blocks.0.mlp.fc1.weight"])


def test_nothing_is_left_that_is_not_known(finished):
    assert surprises(finished / "runs/three") == []
    assert mlflow_states(finished / "runs/mlflow.db") == {stage: ["FINISHED"] for stage in ("", *STAGES)}


@pytest.mark.filterwarnings("ignore")
def test_mlflow_holds_one_parent_and_three_finished_children_with_their_curves(finished):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{finished}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("shardvit")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = {run.data.tags["shardvit.stage"]: run for run in runs if "mlflow.parentRunId" in run.data.tags}
    assert len(parents) == 1 and parents[0].info.status == "FINISHED"
    assert set(children) == set(STAGES) and len(runs) == 4
    for stage, child in children.items():
        assert child.info.status == "FINISHED"
        assert child.data.tags["mlflow.parentRunId"] == parents[0].info.run_id
        assert child.data.params["model.width"] == "16"
        rows = read_metrics(finished / "runs/three" / stage / "metrics.jsonl")
        for name in {name for row in rows for name in row.metrics}:
            ours = [(row.step, row.metrics[name]) for row in rows if name in row.metrics]
            theirs = [(point.step, point.value) for point in client.get_metric_history(child.info.run_id, name)]
            assert sorted(theirs) == ours
    names = set(children["pretrain"].data.metrics)
    assert {"train/loss", "opt/lr", "opt/grad_norm", "perf/images_per_s", "perf/data_wait_frac", "val/top1"} <= names
    assert {data.dataset.name for data in children["finetune"].inputs.dataset_inputs}


def test_typing_the_command_again_skips_what_is_done(finished: Path, run: Run):
    again = run(finished)
    assert again.returncode == 0
    assert again.stdout.count("done already") == 3


def test_a_changed_recipe_is_refused_with_the_difference_shown(finished: Path, run: Run):
    refused = run(finished, "stages.finetune.optimizer.lr=0.5")
    assert refused.returncode == 2
    assert "stages.finetune.optimizer.lr: 0.01 -> 0.5" in refused.stderr


def test_a_later_stage_is_begun_again_without_touching_the_earlier_ones(finished: Path, run: Run):
    before = (finished / "runs/three/pretrain/stage.json").read_bytes()
    old = json.loads((finished / "runs/three/finetune/stage.json").read_text())["model_digest"]
    again = run(finished, "--restart", "finetune", "stages.finetune.optimizer.lr=0.05")
    assert again.returncode == 0, again.stderr
    assert (finished / "runs/three/pretrain/stage.json").read_bytes() == before
    assert json.loads((finished / "runs/three/finetune/stage.json").read_text())["model_digest"] != old
    (aside,) = (finished / "runs/three/replaced").glob("finetune-*")
    assert json.loads((aside / "stage.json").read_text())["model_digest"] == old

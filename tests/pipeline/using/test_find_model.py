"""The model that a path means, among the folders of two real runs: of pre-training and of masked patch prediction."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.pack import pack
from shardvit.model.saved.model_folder import load_model, read_meta
from shardvit.model.vocabulary import COLOURS
from shardvit.pipeline.runs.logs import read_metrics
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.using.find_model import FoundModel, find_model

ROOT = Path(__file__).resolve().parents[3]
STAGES = {"labels": "pretrain", "colours": "masked_patch"}  # of the two runs
OWN: dict[str, dict[str, Any]] = {
    "labels": {"loss": "sigmoid", "head_bias": -1.0, "eval_protocol": "big_vision", "eval_crop_share": 0.75},
    "colours": {"ema": {"decay": 0.5}},
}


def recipe(name: str, shards: Path) -> dict[str, Any]:
    stage = {
        "train": str(shards / "train"),
        "eval": str(shards / "val"),
        "image_size": 8,
        "global_batch_size": 16,
        "duration": "6 steps",
        "optimizer": {"name": "adamw", "lr": 0.01},
        "eval_every": "6 steps",
        "save_every": "2 steps",
        "keep_checkpoints": 3,
    }
    return {
        "name": name,
        "model": {"width": 16, "depth": 1, "heads": 2, "patch_size": 4},
        "engine": {"backend": "accelerate", "precision": "fp32"},
        "stages": {STAGES[name]: {**stage, **OWN[name]}},
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the two runs, each of one process and with checkpoints at steps 2, 4 and 6."""
    top = tmp_path_factory.mktemp("find")
    pack("digits", top / "shards", classes=("3", "8"), holdout=0.3, report=lambda line: None)
    processes = []
    for name, stage in STAGES.items():
        (top / f"{name}.yaml").write_text(yaml.safe_dump(recipe(name, top / "shards")))
        command = [
            sys.executable,
            "-m",
            "shardvit.launch.train",
            f"{name}.yaml",
            "--stage",
            stage,
            "--runs",
            f"{name}-runs",
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        processes.append(
            subprocess.Popen(
                command, cwd=top, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        outputs = [process.communicate(timeout=400)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    (top / "runs").mkdir()
    for name in STAGES:
        (top / f"{name}-runs" / name).rename(top / "runs" / name)
    return top / "runs"


@pytest.fixture
def runs(finished: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    shutil.copytree(finished, tmp_path / "runs")
    return tmp_path / "runs"


def unfinished(runs: Path, name: str) -> Path:
    """The stage's folder, as it was after the last checkpoint."""
    folder = RunFolder(runs_root=runs, name=name)
    folder.update(STAGES[name], state="running")  # pyright: ignore[reportArgumentType]
    stage = runs / name / STAGES[name]
    shutil.rmtree(stage / "model")
    return stage


def damage(checkpoint: Path) -> None:
    weights = checkpoint / "accelerate.pt"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)


def same_weights(found: FoundModel, folder: Path) -> bool:
    _, state = load_model(folder)
    return found.state.keys() == state.keys() and all(torch.equal(found.state[name], state[name]) for name in state)


@pytest.mark.parametrize("name", STAGES)
def test_a_run_its_stage_and_its_models_folder_are_one_model(finished: Path, name: str) -> None:
    model = finished / name / STAGES[name] / "model"
    for path in (finished / name, finished / name / STAGES[name], model):
        found = find_model(path)
        assert (found.meta, found.origin, found.notes) == (read_meta(model), str(model), ())
        assert same_weights(found, model)


def test_the_working_folder_may_be_the_stage_or_its_checkpoints(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(iter(STAGES))
    stage = finished / name / STAGES[name]
    monkeypatch.chdir(stage)
    assert same_weights(find_model(Path()), stage / "model")
    monkeypatch.chdir(stage / "checkpoints")
    assert same_weights(find_model(Path("step-00000006")), stage / "model")


@pytest.mark.parametrize("name", STAGES)
def test_the_last_checkpoint_is_described_as_the_stage_describes_its_model(finished: Path, name: str) -> None:
    stage = finished / name / STAGES[name]
    last = find_model(stage / "checkpoints/step-00000006")
    assert last.meta == read_meta(stage / "model") and last.origin.endswith("step-00000006")
    assert same_weights(last, stage / "model")
    earlier = find_model(stage / "checkpoints/step-00000002")
    assert earlier.meta == last.meta and not same_weights(earlier, stage / "model")


def test_of_what_the_records_tell(finished: Path) -> None:
    labels = find_model(finished / "labels/pretrain/checkpoints/step-00000004").meta
    assert (labels.head, labels.class_names, labels.loss) == ("mlp", ("3", "8"), "sigmoid")
    assert (labels.eval_protocol, labels.eval_crop_share, labels.image_size) == ("big_vision", 0.75, 8)
    colours = find_model(finished / "colours/masked_patch/checkpoints/step-00000004")
    assert (colours.meta.head, colours.meta.class_names) == ("masked_patch", COLOURS)
    assert colours.meta.num_classes == 512 and colours.state["head.weight"].shape == (512, 16)
    assert "mask_token" in colours.state


def test_a_checkpoint_with_a_moving_average_is_the_one_that_its_stage_writes_or_the_one_asked_for(
    finished: Path,
) -> None:
    stage = finished / "colours/masked_patch"
    last = stage / "checkpoints/step-00000006"
    average, trained = find_model(last, weights="ema"), find_model(last, weights="weights")
    assert (average.meta.ema_decay, trained.meta.ema_decay) == (0.5, None)
    assert same_weights(average, stage / "model") and not same_weights(trained, stage / "model")
    assert find_model(last).meta == average.meta == read_meta(stage / "model")
    assert same_weights(find_model(stage, weights="ema"), stage / "model")
    with pytest.raises(UserError, match=r"--weights weights: .*model holds .* only the checkpoints"):
        find_model(stage, weights="weights")


def test_each_evaluation_has_the_moving_averages_metrics_beside_the_ordinary_ones(finished: Path) -> None:
    rows = read_metrics(finished / "colours/masked_patch/metrics.jsonl")
    (found,) = [row.metrics for row in rows if "val/loss" in row.metrics]
    assert {"val/accuracy", "val/ema_loss", "val/ema_accuracy", "val/images"} <= found.keys()
    assert found["val/ema_loss"] != found["val/loss"]
    results = RunFolder(runs_root=finished, name="colours").record("masked_patch").results
    assert results["val/ema_loss"] == found["val/ema_loss"]
    plain = read_metrics(finished / "labels/pretrain/metrics.jsonl")
    assert not any(key.startswith("val/ema") for row in plain for key in row.metrics)


def test_the_moving_average_of_what_has_none_is_refused(finished: Path) -> None:
    stage = finished / "labels/pretrain"
    with pytest.raises(UserError, match=r"--weights ema: .*step-00000006 has no moving average"):
        find_model(stage / "checkpoints/step-00000006", weights="ema")
    with pytest.raises(UserError, match=r"--weights ema: .*only the checkpoints"):
        find_model(stage, weights="ema")
    assert find_model(stage, weights="weights").meta.ema_decay is None


@pytest.mark.parametrize("name", STAGES)
def test_of_an_unfinished_stage_the_newest_whole_checkpoint_is_taken_and_it_is_said(runs: Path, name: str) -> None:
    stage = unfinished(runs, name)
    found = find_model(stage)
    assert found.origin == str(stage / "checkpoints/step-00000006")
    assert found.notes == (f"{STAGES[name]} is not done: this is its checkpoint step-00000006",)

    damage(stage / "checkpoints/step-00000006")
    found = find_model(stage)
    assert found.origin == str(stage / "checkpoints/step-00000004")
    assert found.notes[0].endswith("this is its checkpoint step-00000004")
    (passed_over,) = found.notes[1:]
    assert "step-00000006 is damaged" in passed_over
    with pytest.raises(UserError, match=r"step-00000006 is damaged .*: take another one"):
        find_model(stage / "checkpoints/step-00000006")

    for checkpoint in ("step-00000002", "step-00000004"):
        damage(stage / "checkpoints" / checkpoint)
    with pytest.raises(UserError, match=r"no whole checkpoint \(.*step-00000006 is damaged .*\): run it first"):
        find_model(stage)


def test_a_run_without_a_finished_stage_names_what_there_is(runs: Path) -> None:
    stage = unfinished(runs, "labels")
    with pytest.raises(UserError, match=f"none of its stages is done: give {stage} for its newest checkpoint"):
        find_model(stage.parent)
    shutil.rmtree(stage)
    with pytest.raises(UserError, match="none of its stages is done: run it first"):
        find_model(stage.parent)
    stage.mkdir()
    with pytest.raises(UserError, match="pretrain is not done and has no whole checkpoint: run it first"):
        find_model(stage)


def test_a_stage_whose_record_does_not_say_what_its_model_is_is_refused(runs: Path) -> None:
    stage = unfinished(runs, "labels")
    RunFolder(runs_root=runs, name="labels").update("pretrain", model={})
    with pytest.raises(UserError, match=r"pretrain/stage\.json .*run the recipe again"):
        find_model(stage)


def test_a_checkpoint_of_another_model_than_its_record_is_refused(runs: Path) -> None:
    folder = RunFolder(runs_root=runs, name="labels")
    described = folder.record("pretrain").model
    folder.update("pretrain", model={**described, "model": {**described["model"], "position": "none"}})
    with pytest.raises(UserError, match="another model than its recipe says: it has pos_embed besides"):
        find_model(runs / "labels/pretrain/checkpoints/step-00000004")


@pytest.mark.parametrize("name", STAGES)
def test_an_unfinished_stage_needs_no_data(runs: Path, name: str) -> None:
    meta = read_meta(runs / name / STAGES[name] / "model")
    stage = unfinished(runs, name)
    path = runs / name / "recipe.yaml"
    recipe = yaml.safe_load(path.read_text())
    recipe["stages"][STAGES[name]] |= {"train": str(runs / "gone"), "eval": str(runs / "gone")}
    path.write_text(yaml.safe_dump(recipe))
    assert find_model(stage).meta == meta


def test_where_nothing_is_the_message_says_what_was_looked_for(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is not there: give a run's folder, a checkpoint, or a file"):
        find_model(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty has no config\.json"):
        find_model(tmp_path / "empty")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UserError, match=r"notes\.txt is of no kind that can be imported"):
        find_model(tmp_path / "notes.txt")
    (runs / "labels/recipe.yaml").unlink()
    with pytest.raises(UserError, match=r"its recipe\.yaml is needed"):
        find_model(runs / "labels/pretrain/checkpoints/step-00000004")

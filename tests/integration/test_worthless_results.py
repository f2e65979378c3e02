"""Runs whose result is worth nothing say so: a model that is not finite is a failure, one of a single answer a warning.

Real processes, one rank each.
"""

import json
from pathlib import Path

import pytest

from shardvit.data_shards.packing.pack import pack
from tests.conftest import RunCli
from tests.small_recipe import small_recipe, small_stage, write_recipe

STEPS = 8


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A working folder with shards of three classes and a recipe of three stages."""
    pack("digits", tmp_path / "shards", classes=("0", "1", "2"), holdout=0.2, report=lambda text: None)
    common = {"duration": f"{STEPS} steps", "log_every": "2 steps"}
    recipe = small_recipe(
        "law",
        processes=1,
        pictures="off",
        tracking={"mode": "offline"},
        engine={"precision": "fp32"},
        pretrain_=small_stage(**common),
        swap_head_={},
        finetune_=small_stage(**common, optimizer={"name": "sgd", "lr": 0.01}),
    )
    write_recipe(tmp_path / "recipe.yaml", recipe)
    return tmp_path


def test_a_stage_that_ends_with_nan_has_failed_and_nothing_follows_it(work: Path, run_preloaded: RunCli) -> None:
    run = work / "runs" / "law"
    for _ in range(2):  # the same command finds the same
        done = run_preloaded("run", "recipe.yaml", "pretrain.optimizer.lr=1e38", cwd=work)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "held-out loss" in done.stderr and "--restart pretrain" in done.stderr
        assert "Traceback" not in done.stderr and ": done" not in done.stdout
        record = json.loads((run / "pretrain" / "stage.json").read_text())
        assert (record["state"], record["last_saved_step"], record["results"]) == ("running", STEPS, {})
        assert not (run / "pretrain" / "model").exists() and not (run / "swap_head" / "model").exists()
        assert (run / "pretrain" / "checkpoints" / f"step-{STEPS:08d}").is_dir()


def test_a_model_that_gives_one_answer_is_told_once_with_the_figures_beside_its_top1(
    work: Path, run_preloaded: RunCli
) -> None:
    frozen = "pretrain.optimizer.frozen=[head]"  # whose last layer is zero
    done = run_preloaded("run", "recipe.yaml", "--stage", "pretrain", frozen, cwd=work)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    results = json.loads((work / "runs" / "law" / "pretrain" / "stage.json").read_text())["results"]
    assert results["val/balanced_accuracy"] == pytest.approx(1 / 3)
    assert results["val/top1"] <= results["val/commonest_class_share"] < 0.5
    images = int(results["val/images"])
    assert said.count("warning") == 1 and f"{images} of {images} answers" in said and "'0'" in said
    last = next(line for line in reversed(said.splitlines()) if line.startswith("pretrain: done"))
    assert "balanced accuracy 0.3333" in last and f"{results['val/commonest_class_share']:.4f}" in last

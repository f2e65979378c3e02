"""A masked autoencoder by the real command: two processes fill in digits, then a classifier, fine-tuned by layers."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardvit.data_shards.packing.pack import pack
from shardvit.model.positions.embedding import sincos_2d
from shardvit.model.saved.model_folder import load_model
from shardvit.pipeline.runs.logs import read_metrics
from tests.small_recipe import SMALL, curve, small_recipe, small_stage, write_recipe

pytestmark = pytest.mark.slow  # a minute or two
STEPS, SAVED = 80, 40

Run = Callable[..., subprocess.CompletedProcess[str]]


def recipe(folder: Path) -> dict:
    masked_autoencoder = small_stage(
        folder / "many",
        image_size=32,
        global_batch_size=64,
        duration=f"{STEPS} steps",
        decoder={"width": 32, "depth": 2, "heads": 2},
        optimizer={"name": "adamw", "lr": 0.003, "weight_decay": 0.05, "betas": [0.9, 0.95]},
        schedule={"warmup": "10%"},
        augment={"crop_area": [0.6, 1.0], "flip": 0},
        ema={"decay": 0.9},
        keep_best="loss",
        few_shot=[{"name": "digits", "train": str(folder / "many/train"), "eval": str(folder / "many/val")}],
        log_every="7 steps",  # no multiple of save_every: a point of the curve spans a checkpoint
        eval_every="50%",
        save_every=f"{SAVED} steps",
        keep_checkpoints=STEPS // SAVED,
    )
    return small_recipe(
        "mae",
        model=SMALL
        | {"width": 32, "depth": 2, "pool": "gap", "class_token": "kept", "final_norm": "pooled"}
        | {"gelu": "erf", "interpolation": "timm"},
        seed=3,
        processes=2,
        engine={"zero_stage": 2, "precision": "fp32", "max_micro_batch_size": 16},
        masked_autoencoder_=masked_autoencoder,
        swap_head_={},
        finetune_=small_stage(
            folder / "few",
            image_size=48,
            duration="8 steps",
            optimizer={"name": "adamw", "lr": 0.003, "layer_decay": 0.75},
        ),
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, run_preloaded: Run) -> Path:
    """A folder in which a whole pipeline has run."""
    folder = tmp_path_factory.mktemp("mae")
    quiet = lambda text: None  # noqa: E731
    pack("digits", folder / "many", holdout=0.2, samples_per_shard=200, report=quiet)
    pack("digits", folder / "few", classes=("8", "9"), holdout=0.3, report=quiet)
    write_recipe(folder / "recipe.yaml", recipe(folder))
    done = run_preloaded("run", "recipe.yaml", cwd=folder, timeout_seconds=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "masked_autoencoder: done, held-out loss" in done.stdout
    return folder


def record(folder: Path, stage: str, *, runs: str = "runs") -> dict:
    return json.loads((folder / runs / "mae" / stage / "stage.json").read_text())


def test_the_held_out_loss_falls_below_that_of_a_patchs_mean(finished: Path):
    """A normalised patch that is predicted by its mean has the loss 1; flat ones, of digits the corners, less."""
    results = record(finished, "masked_autoencoder")["results"]
    assert results["val/loss"] < 0.75 and 0 < results["val/ema_loss"] < 0.85 and "val/accuracy" not in results
    rows = read_metrics(finished / "runs/mae/masked_autoencoder/metrics.jsonl")
    assert next(row.metrics["train/loss"] for row in rows if "train/loss" in row.metrics) > 1
    assert not any("train/top1" in row.metrics or "train/accuracy" in row.metrics for row in rows)
    few_shot = [row.metrics["val/fewshot_digits_5shot"] for row in rows if "val/fewshot_digits_5shot" in row.metrics]
    assert len(few_shot) == 2 and min(few_shot) > 0.2  # of ten digits


def test_the_trunk_goes_on_with_positions_that_are_learned(finished: Path):
    meta, before = load_model(finished / "runs/mae/masked_autoencoder/model")
    assert meta.head == "masked_autoencoder" and meta.decoder and meta.decoder.width == 32
    assert "pos_embed" not in before and before["decoder.mask_token"].any()
    after, swapped = load_model(finished / "runs/mae/swap_head/model")
    assert after.head == "linear" and after.class_names == ("8", "9") and after.decoder is None
    shared = {name for name in before if not name.startswith(("decoder.", "norm."))}
    assert all(torch.equal(swapped[name], before[name]) for name in shared)
    assert {*swapped} - shared == {"pos_embed", "fc_norm.weight", "fc_norm.bias", "head.weight", "head.bias"}
    assert torch.equal(swapped["pos_embed"][0, 1:], sincos_2d(8, 32, law="mae"))
    _, tuned = load_model(finished / "runs/mae/finetune/model")
    assert tuned["pos_embed"].shape == (1, 145, 32) and tuned["pos_embed"][0, 0].any()  # they have moved


@pytest.mark.parametrize(
    ("runs", "overrides"),
    [("again", ()), ("otherwise", ("processes=1", "engine.zero_stage=1", "data.workers=2"))],
)
def test_a_run_goes_on_after_a_kill(finished: Path, run_preloaded: Run, runs: str, overrides: tuple[str, ...]):
    """With the same processes to the same bits; with half of them, another ZeRO stage and workers to rounding."""
    shutil.copytree(finished / "runs", finished / runs)
    stage = finished / runs / "mae/masked_autoencoder"
    for name in ("swap_head", "finetune"):
        shutil.rmtree(stage.parent / name)
    shutil.rmtree(stage / "model")
    for checkpoint in (stage / "checkpoints").glob("step-*"):
        if checkpoint.name != f"step-{SAVED:08d}":
            shutil.rmtree(checkpoint)
    changed = record(finished, "masked_autoencoder")
    changed |= {"state": "running", "last_saved_step": SAVED, "results": {}, "model_digest": ""}
    (stage / "stage.json").write_text(json.dumps(changed))
    done = run_preloaded(
        *("run", "recipe.yaml", "--stage", "masked_autoencoder", "--runs", runs, *overrides),
        cwd=finished,
        timeout_seconds=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step {SAVED} of {STEPS}" in done.stdout + done.stderr
    undisturbed, resumed = (record(finished, "masked_autoencoder", runs=each) for each in ("runs", runs))
    ours, theirs = (curve(finished / each / "mae/masked_autoencoder") for each in ("runs", runs))
    assert len(ours) > STEPS // 7
    if not overrides:
        assert resumed["model_digest"] == undisturbed["model_digest"]
        assert resumed["results"] == undisturbed["results"] and ours == theirs
    else:
        assert resumed["results"] == pytest.approx(undisturbed["results"], rel=1e-4)
        assert [step for step, _ in ours] == [step for step, _ in theirs]

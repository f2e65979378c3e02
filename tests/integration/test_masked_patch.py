"""Masked patch prediction by the real command: two processes learn the colours of digits, then a classifier."""

import json
import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardvit.data_shards.images.transforms import EvalTransform
from shardvit.data_shards.loading.assemble import Access
from shardvit.data_shards.loading.loader import EvalBatches, eval_batches
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.reading.opening import open_shards
from shardvit.model.saved.model_folder import load_model
from shardvit.model.self_supervised.masked_patch import colour_classes
from shardvit.pipeline.runs.logs import read_metrics
from tests.small_recipe import SMALL, curve, small_recipe, small_stage, write_recipe

STEPS, SAVED = 120, 60

Run = Callable[..., subprocess.CompletedProcess[str]]


def recipe(folder: Path) -> dict:
    masked_patch = small_stage(
        folder / "many",
        image_size=16,
        global_batch_size=64,
        duration=f"{STEPS} steps",
        optimizer={"name": "adamw", "lr": 0.005, "weight_decay": 0.05},
        schedule={"warmup": "10%"},
        augment={"crop_area": [0.9, 1.0], "flip": 0.5},
        log_every="7 steps",  # no multiple of save_every: a point of the curve spans a checkpoint
        eval_every="50%",
        save_every=f"{SAVED} steps",
        keep_checkpoints=STEPS // SAVED,
    )
    return small_recipe(
        "masked",
        model=SMALL | {"width": 32, "depth": 2, "pool": "map"},
        seed=3,
        processes=2,
        engine={"zero_stage": 2, "precision": "bf16", "max_micro_batch_size": 16},
        masked_patch_=masked_patch,
        swap_head_={},
        finetune_=small_stage(folder / "few", image_size=24, duration="8 steps"),
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, run_preloaded: Run) -> Path:
    """A folder in which a whole pipeline has run."""
    folder = tmp_path_factory.mktemp("masked")
    quiet = lambda text: None  # noqa: E731
    pack("digits", folder / "many", holdout=0.2, samples_per_shard=200, report=quiet)
    pack("digits", folder / "few", classes=("8", "9"), holdout=0.3, report=quiet)
    write_recipe(folder / "recipe.yaml", recipe(folder))
    done = run_preloaded("run", "recipe.yaml", cwd=folder, timeout_seconds=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "masked_patch: done, held-out accuracy" in done.stdout
    return folder


def stage_record(folder: Path, stage: str, *, runs: str = "runs") -> dict:
    return json.loads((folder / runs / "masked" / stage / "stage.json").read_text())


def best_guess(folder: Path) -> float:
    """The loss of whoever knows how often each colour occurs among the held-out patches, and nothing else."""
    shards = open_shards(str(folder / "many/val"))
    batches = EvalBatches(Access(shards), transform=EvalTransform(16), rank=0, world_size=1, batch_size=100)
    colours = [colour_classes(batch.images[batch.counted], patch_size=4) for batch in eval_batches(batches, workers=0)]
    share = torch.bincount(torch.cat(colours).flatten()).double()
    share = share[share > 0] / share.sum()
    return -(share * share.log()).sum().item()


def test_the_held_out_loss_falls_below_the_best_guess_without_an_image(finished: Path):
    rows = read_metrics(finished / "runs/masked/masked_patch/metrics.jsonl")
    first = next(row.metrics["train/loss"] for row in rows if "train/loss" in row.metrics)
    assert abs(first - math.log(512)) < 1.0  # the head begins at zero
    results = stage_record(finished, "masked_patch")["results"]
    assert results["val/loss"] < best_guess(finished) - 0.2
    assert results["val/loss"] < min(2.0, first / 3)
    assert results["val/accuracy"] > 0.35
    assert results["val/images"] == sum(open_shards(str(finished / "many/val")).shard_sizes)


def test_the_trunk_goes_on_and_what_belongs_to_the_task_does_not(finished: Path):
    meta, masked = load_model(finished / "runs/masked/masked_patch/model")
    assert meta.head == "masked_patch" and meta.num_classes == 512 and meta.class_names[64 + 8 + 1] == "r1 g1 b1"
    assert masked["mask_token"].any() and masked["head.weight"].shape == (512, 32)
    after, swapped = load_model(finished / "runs/masked/swap_head/model")
    assert after.head == "linear" and after.class_names == ("8", "9")
    own = {"mask_token", "head.weight", "head.bias"}
    assert all(torch.equal(swapped[name], it) for name, it in masked.items() if name not in own)
    assert not swapped["head.weight"].any() and "mask_token" not in swapped
    assert {name.split(".")[0] for name in set(swapped) - set(masked)} == {"attn_pool"}


def test_a_run_that_goes_on_after_a_kill_ends_with_the_same_bits(finished: Path, run_preloaded: Run):
    """From what a kill soon after the first checkpoint leaves behind."""
    shutil.copytree(finished / "runs", finished / "again")
    stage = finished / "again/masked/masked_patch"
    for name in ("swap_head", "finetune"):
        shutil.rmtree(finished / "again/masked" / name)
    shutil.rmtree(stage / "model")
    for checkpoint in (stage / "checkpoints").glob("step-*"):
        if checkpoint.name != f"step-{SAVED:08d}":
            shutil.rmtree(checkpoint)
    record = stage_record(finished, "masked_patch")
    record |= {"state": "running", "last_saved_step": SAVED, "results": {}, "model_digest": ""}
    (stage / "stage.json").write_text(json.dumps(record))

    done = run_preloaded(
        "run", "recipe.yaml", "--stage", "masked_patch", "--runs", "again", cwd=finished, timeout_seconds=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step {SAVED} of {STEPS}" in done.stdout + done.stderr
    undisturbed, resumed = (stage_record(finished, "masked_patch", runs=runs) for runs in ("runs", "again"))
    assert resumed["model_digest"] == undisturbed["model_digest"]
    assert resumed["results"] == undisturbed["results"]
    ours, theirs = (curve(finished / runs / "masked/masked_patch") for runs in ("runs", "again"))
    assert ours == theirs and len(ours) > STEPS // 7

"""A real run from timm's weights on two processes: first timm's scores, and a resume ends with the same bits."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from timm.models import save_for_hf

from shardvit.data_shards.images.transforms import EvalTransform
from shardvit.data_shards.loading.assemble import Access
from shardvit.data_shards.loading.loader import EvalBatches, eval_batches
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.reading.opening import open_shards
from shardvit.pipeline.runs.logs import read_metrics
from tests.model.comparing import randomise
from tests.small_recipe import SMALL, curve, small_recipe, small_stage, write_recipe

Run = Callable[..., subprocess.CompletedProcess[str]]
SIZES = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}


def test_it_starts_with_timms_answers_and_resumes_from_its_checkpoint(tmp_path: Path, run_preloaded: Run):
    pack("digits", tmp_path / "digits", holdout=0.2, report=lambda line: None)
    theirs = randomise(timm.create_model("vit_base_patch16_224", num_classes=10, **SIZES)).eval()
    save_for_hf(theirs, tmp_path / "theirs", model_args=SIZES, safe_serialization=True)
    keys = {"init": "theirs", "head": "linear", "duration": "8 steps", "save_every": "4 steps", "ema": {}}
    stage = small_stage(tmp_path / "digits", eval_every="4 steps", **keys)
    engine = {"zero_stage": 2, "precision": "fp32"}
    model = {**SMALL, "gelu": "erf", "interpolation": "timm"}
    tree = small_recipe(model=model, processes=2, engine=engine, pictures="off", pretrain_=stage)
    write_recipe(tmp_path / "recipe.yaml", tree)
    done = run_preloaded("run", "recipe.yaml", cwd=tmp_path, timeout_seconds=500)
    assert done.returncode == 0, done.stdout + done.stderr

    shards = open_shards(str(tmp_path / "digits/val"))
    batches = EvalBatches(Access(shards), transform=EvalTransform(8), rank=0, world_size=1, batch_size=100)
    losses, right = [], []
    for batch in eval_batches(batches, workers=0):
        pixels = batch.images[batch.counted].permute(0, 3, 1, 2).float() / 255
        labels = batch.labels[batch.counted]
        mean, std = (torch.tensor(theirs.pretrained_cfg[name]).view(3, 1, 1) for name in ("mean", "std"))
        with torch.no_grad():
            logits = theirs((pixels - mean) / std)
        losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="none"))
        right.append(logits.argmax(dim=1) == labels)
    folder = tmp_path / "runs/r/pretrain"
    first = read_metrics(folder / "metrics.jsonl")[0]
    assert first.step == 0
    for average in ("", "ema_"):
        assert first.metrics[f"val/{average}loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-6)
        assert first.metrics[f"val/{average}top1"] == pytest.approx(torch.cat(right).double().mean().item())
    said = (folder / "events.jsonl").read_text()
    assert all(said.count(f"init {what}") == 1 for what in ("loaded", "left", "made"))

    shutil.copytree(tmp_path / "runs", tmp_path / "again")  # as a kill after the first checkpoint leaves it
    again = tmp_path / "again/r/pretrain"
    shutil.rmtree(again / "model")
    shutil.rmtree(again / "checkpoints/step-00000008")
    record = json.loads((folder / "stage.json").read_text())
    killed = {"state": "running", "last_saved_step": 4, "results": {}, "model_digest": ""}
    (again / "stage.json").write_text(json.dumps(record | killed))
    shutil.rmtree(tmp_path / "theirs")
    done = run_preloaded("run", "recipe.yaml", "--runs", "again", cwd=tmp_path, timeout_seconds=500)
    assert done.returncode == 0, done.stdout + done.stderr
    resumed = json.loads((again / "stage.json").read_text())
    assert resumed["model_digest"] == record["model_digest"] and resumed["inputs"] == record["inputs"]
    assert curve(again) == curve(folder)

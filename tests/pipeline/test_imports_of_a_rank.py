"""What a rank imports up to its first step: every second of it is paid by every process at every start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Each takes 0.3 to 2 CPU seconds, and no step of a recipe that compiles nothing needs it.
NEEDLESS = ("torch._dynamo", "torch._inductor", "sympy", "mlflow", "pandas", "sklearn", "setuptools")

RANK = """
import json, sys, tempfile
from pathlib import Path
import torch
from shardvit.model.without_compiler import import_timm

import_timm()
import shardvit.pipeline.training.stages
from shardvit.model.vit import build_model
from shardvit.model.init import initialise
from shardvit.pipeline.engine.open import open_engine
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.stage_plan import plan_stage

stage, zero_stage = sys.argv[1:]
recipe = load_recipe("digits", overrides=[f"engine.zero_stage={zero_stage}", "processes=1"])
ranks = Ranks(Place(), timeout_seconds=60)
plan = plan_stage(recipe, stage=stage, samples_per_epoch=640, world_size=1)
head = "mlp" if stage == "pretrain" else "linear"
model = build_model(recipe.model, image_size=recipe.train_stage(stage).image_size, num_classes=3, head=head)
initialise(model, seed=0)
engine = open_engine(recipe, stage=stage, plan=plan, model=model, ranks=ranks)
before = [parameter.detach().clone() for parameter in engine.module.parameters()]
size = recipe.train_stage(stage).image_size
engine.backward((engine.forward(torch.randn(2, 3, size, size)) + 1).square().sum())
engine.step(lr=0.1, flags=(False, False))
engine.snapshot()
moved = any(not torch.equal(*pair) for pair in zip(before, engine.module.parameters(), strict=True))
print(json.dumps({"modules": sorted(sys.modules), "moved": moved, "compile": torch.compile.__module__}))
"""


@pytest.mark.parametrize(("stage", "zero_stage"), [("pretrain", "1"), ("finetune", "2")])  # AdamW, SGD
def test_a_rank_imports_nothing_needless(stage: str, zero_stage: str):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    ended = subprocess.run(
        [sys.executable, "-c", RANK, stage, zero_stage], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["moved"] and told["compile"] == "torch"  # the step is a step, and the compiler is where it was
    assert {"torch", "timm", "deepspeed"} <= set(told["modules"])
    assert [name for name in NEEDLESS if name in told["modules"]] == []


USE = """
from shardvit.model.without_compiler import import_timm, keep_out_of_optimizers

import_timm()
from shardvit.pipeline.engine.deepspeed_engine import import_deepspeed

import_deepspeed()
import torch
from deepspeed.runtime.zero.muon.original_muon import zeropower_via_newtonschulz5
from torchvision.ops.roi_align import is_compile_supported
import timm.models.naflexvit

keep_out_of_optimizers()
assert isinstance(is_compile_supported("cpu"), bool)
import torch._dynamo.utils

assert torch._dynamo.utils.is_compile_supported is not is_compile_supported  # the real one, under its name
compiled = torch.compile(lambda x: x + 1, backend="eager")
assert compiled(torch.ones(2)).tolist() == [2, 2]
torch._dynamo.config.suppress_errors = True
weight = torch.nn.Parameter(torch.ones(3))
for kind in (torch.optim.AdamW, torch.optim.SGD):
    optimizer = kind([weight], lr=0.5)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert not weight.grad_fn and weight.requires_grad and torch.is_grad_enabled()
print("fine")
"""


def test_what_was_deferred_is_imported_when_called():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    ended = subprocess.run([sys.executable, "-c", USE], env=environment, capture_output=True, text=True, check=False)
    assert ended.stdout.endswith("fine\n"), ended.stderr

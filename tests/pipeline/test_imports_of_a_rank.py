"""What a rank imports up to its first step: every second of it is paid by every process at every start."""

from __future__ import annotations

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
import json, sys
import torch
from model.importing import import_timm

import_timm()
from model.build import build_model
from model.config import ModelConfig
from model.init import initialise
from pipeline.engine.importing import import_deepspeed
from pipeline.optimizers.optim import build_optimizer
from pipeline.recipe.optimizer import OptimizerConfig

deepspeed = import_deepspeed()
import pipeline.stages

model = build_model(
    ModelConfig(width=16, depth=1, heads=1, patch_size=4), image_size=8, num_classes=3, head=sys.argv[1]
)
initialise(model, seed=0)
optimizer = build_optimizer(model, OptimizerConfig(name=sys.argv[2], lr=0.1))
before = [parameter.detach().clone() for parameter in model.parameters()]
model(torch.randn(2, 3, 8, 8)).sum().backward()
for group in optimizer.param_groups:
    group["lr"] = 0.1
optimizer.step()
optimizer.zero_grad()
moved = any(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
print(json.dumps({"modules": sorted(sys.modules), "moved": moved, "compile": torch.compile.__module__}))
"""


@pytest.mark.parametrize(("head", "optimizer"), [("mlp", "adamw"), ("linear", "sgd")])
def test_a_rank_that_compiles_nothing_imports_no_compiler(head: str, optimizer: str):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    ended = subprocess.run(
        [sys.executable, "-c", RANK, head, optimizer], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["moved"] and told["compile"] == "torch"  # the step is a step, and the compiler is where it was
    assert {"torch", "timm", "deepspeed"} <= set(told["modules"])
    assert [name for name in NEEDLESS if name in told["modules"]] == []


USE = """
from model.importing import import_timm

import_timm()
import pipeline.engine.importing as importing

importing.import_deepspeed()
import torch
from deepspeed.runtime.zero.muon.original_muon import zeropower_via_newtonschulz5
from pipeline.optimizers.eager import keep_compiler_out
from torchvision.ops.roi_align import is_compile_supported
import timm.models.naflexvit

keep_compiler_out()
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


def test_what_was_left_out_comes_when_it_is_called_for():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    ended = subprocess.run([sys.executable, "-c", USE], env=environment, capture_output=True, text=True, check=False)
    assert ended.stdout.endswith("fine\n"), ended.stderr

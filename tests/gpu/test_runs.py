"""Whole runs by `shardvit run` on the device: killed and resumed to the last bit; models predict and are exported."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shardvit.pipeline.runs.logs import read_metrics
from shardvit.pipeline.using.predict import open_predictor
from tests.faults.harness import Case, pack_shards
from tests.small_recipe import small_recipe, small_stage

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
RunCli = Callable[..., subprocess.CompletedProcess[str]]
KILLED, SAVED = 30, 20
ENGINES: dict[str, dict[str, Any]] = {
    "ZeRO 1, bf16": {},
    "ZeRO 3, bf16": {"zero_stage": 3},
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_shards(tmp_path_factory.mktemp("shards") / "digits")


def case_of(folder: Path, shards: Path, name: str) -> Case:
    """40 steps with everything random, and a new head; saves beside training."""
    stage = small_stage(
        shards,
        head="linear",  # timm has no other
        global_batch_size=32,
        duration="40 steps",
        augment={"mixup_alpha": 0.2, "random_erasing": {"probability": 0.2}},
        dropout=0.1,
        patch_dropout=0.5,
        ema={"decay": 0.9},
        log_every="7 steps",
        save_every=f"{SAVED} steps",
        keep_checkpoints=2,
    )
    model = {"width": 64, "depth": 2, "heads": 2, "patch_size": 4}
    tree = small_recipe("law", model=model, seed=7, processes=1, engine=ENGINES[name], pretrain_=stage)
    return Case(folder, shards, content=tree)


@pytest.mark.parametrize("name", ENGINES)
def test_a_killed_run_goes_on_to_the_same_bits(name: str, tmp_path: Path, shards: Path, device: torch.device):
    there = {"DS_ACCELERATOR": device.type}
    undisturbed, case = (case_of(tmp_path / each, shards, name) for each in ("undisturbed", "killed"))
    ended = undisturbed.start(how="run", environment=there).wait()
    assert ended.code == 0, ended.output
    assert trained_on_a_gpu(undisturbed) == (device.type == "cuda"), "it ran elsewhere"
    kill = case.fault("kill_all", "between_steps", rank=0, step=KILLED)
    ended = case.start(how="run", faults=[kill], environment=there).wait()
    assert ended.code == -signal.SIGKILL, ended.output
    ended = case.start(how="run", environment=there).wait()
    assert ended.code == 0, ended.output
    assert case.curve() == undisturbed.curve() and len(case.curve()) >= 6
    assert case.record()["model_digest"] == undisturbed.record()["model_digest"]
    assert case.record()["results"] == undisturbed.record()["results"]


def trained_on_a_gpu(case: Case) -> bool:
    return any("perf/gpu_memory_peak_gib" in row.metrics for row in read_metrics(case.stage / "metrics.jsonl"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, shards: Path, device: torch.device) -> Case:
    """A finished run."""
    case = case_of(tmp_path_factory.mktemp("trained") / "case", shards, "ZeRO 1, bf16")
    ended = case.start(how="run", environment={"DS_ACCELERATOR": device.type}).wait()
    assert ended.code == 0, ended.output
    return case


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_the_model_predicts_on_the_device_as_on_the_cpu(trained: Case, images, device, record_property):
    found, expected = (open_predictor(trained.run, device=where)(images) for where in (device.type, "cpu"))
    far = float((found - expected).abs().max() / expected.abs().max())
    record_property("difference", f"{far:.1e} of the largest logit, bound 5e-3")  # cuDNN convolves in TF32
    assert expected.std() > 0 and far <= 5e-3


@pytest.mark.parametrize("to", ["timm", "npz", "torch_export", "onnx"])
def test_an_exported_model_answers_as_on_the_device(to: str, trained: Case, images, device, run_cli: RunCli):
    if to == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package, reason=f"{package} is not installed (extra onnx)", exc_type=ImportError)
    out = trained.folder / {"timm": "timm", "npz": "m.npz", "torch_export": "m.pt2", "onnx": "m.onnx"}[to]
    done = run_cli("export", trained.run, "--format", to, "--output", out, cwd=trained.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    expected, found = open_predictor(trained.run, device=device.type)(images), open_predictor(out, device="cpu")(images)
    assert (found - expected).abs().max() <= 5e-3 * expected.abs().max()


def test_the_command_predicts_the_same_classes(trained: Case, run_cli: RunCli, tmp_path: Path, device: torch.device):
    for number in range(6):
        draw = np.random.default_rng(number)
        Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
    shares = []
    for where in (device.type, "cpu"):
        done = run_cli("predict", trained.run, tmp_path, "--json", "--device", where, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout)
        shares.append([{each["class"]: each["probability"] for each in image["predictions"]} for image in found])
    assert len(shares[0]) == 6
    for one, other in zip(*shares, strict=True):
        assert one == pytest.approx(other, abs=1e-2)

"""Weights of another library through the pipeline: import, fine-tuning, export of a sharded checkpoint, predict."""

import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer
from transformers import AutoModelForImageClassification, ViTForImageClassification

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.pack import pack
from shardvit.launch.cli import app
from shardvit.model.formats.detect import import_file
from shardvit.model.saved.model_folder import build_from_saved, load_model, read_meta
from tests.small_recipe import small_stage, write_recipe

RunCli = Callable[..., subprocess.CompletedProcess[str]]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZES = ("--width", "32", "--depth", "2", "--heads", "4", "--patch-size", "4", "--mlp-dim", "64")
MODEL = "{width: 32, depth: 2, heads: 4, patch_size: 4, mlp_dim: 64, layer_norm_eps: 1.0e-12}"
EPSILON = 1e-12


def command(*arguments: object) -> int:
    """`shardvit ...` in this process, which saves a start: `run_cli` is for what starts processes itself."""
    return app(list(map(str, arguments)), exit_on_error=False, print_error=False, result_action="return_value")


def their_model() -> VisionTransformer:
    """torchvision's class, erf GELU and all, with transformers' epsilon and random weights, the same at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = VisionTransformer(
            image_size=8,
            patch_size=4,
            num_layers=2,
            num_heads=4,
            hidden_dim=32,
            mlp_dim=64,
            num_classes=7,
            norm_layer=partial(nn.LayerNorm, eps=EPSILON),
        )
        with torch.no_grad():  # its head and positions begin at zero, or nearly; tokens small, so that epsilon matters
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
            for parameter in (model.conv_proj.weight, model.encoder.pos_embedding, model.class_token):
                parameter.mul_(0.01)
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_cli: RunCli) -> Path:
    """Where their model was imported and fine-tuned at a higher resolution on two processes under ZeRO-2."""
    folder = tmp_path_factory.mktemp("elsewhere")
    torch.save(their_model().state_dict(), folder / "theirs.pth")
    pack("digits", folder / "digits", classes=("3", "8"), holdout=0.3, report=lambda line: None)
    recipe = {
        "name": "tuned",
        "processes": 2,
        "engine": {"zero_stage": 2, "precision": "bf16"},
        "stages": {
            "swap_head": {"model": "imported"},
            "finetune": small_stage(
                "digits",
                image_size=16,
                duration="8 steps",
                stochastic_depth=0.1,
                patch_dropout=0.5,
                unmasked_finish="2 steps",
                save_every="4 steps",
                log_every="2 steps",
            ),
        },
    }
    write_recipe(folder / "recipe.yaml", recipe)
    said = (*SIZES, "--layer-norm-eps", str(EPSILON))
    assert command("import", folder / "theirs.pth", folder / "imported", *said) == 0
    done = run_cli("run", "recipe.yaml", cwd=folder, timeout_seconds=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_imported_model_answers_as_theirs(folder: Path):
    meta, model = build_from_saved(folder / "imported")
    assert (meta.mean, meta.std, meta.model.gelu, meta.num_classes) == (MEAN, STD, "erf", 7)
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours, theirs = model.eval()(images), their_model()(images)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_fine_tuning_keeps_their_normalisation_and_trains_from_their_weights(folder: Path):
    meta, tuned = load_model(folder / "runs/tuned/finetune/model")
    _, imported = load_model(folder / "imported")
    assert (meta.mean, meta.std, meta.image_size, meta.class_names) == (MEAN, STD, 16, ("3", "8"))
    change = (tuned["blocks.0.mlp.fc1.weight"] - imported["blocks.0.mlp.fc1.weight"]).abs()
    assert 0 < change.max() < 0.05
    assert tuned["head.weight"].shape == (2, 32) and tuned["head.weight"].any()


def test_the_result_loads_in_timm_and_transformers_as_it_is(folder: Path):
    """timm needs one argument, the epsilon, and says so."""
    result = folder / "runs/tuned/finetune/model"
    meta, model = build_from_saved(result)
    assert meta.model.layer_norm_eps == EPSILON and meta.model.gelu == "erf"
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    by_timm = timm.create_model(f"local-dir:{result}", pretrained=True, norm_layer=partial(nn.LayerNorm, eps=EPSILON))
    by_transformers = AutoModelForImageClassification.from_pretrained(result)
    assert isinstance(by_transformers, ViTForImageClassification)
    with torch.no_grad():
        expected = model.eval()(images)
        for found in (by_timm.eval()(images), by_transformers.eval()(images).logits):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(KeyError, match="eps=1e-12"):
        timm.create_model(f"local-dir:{result}", pretrained=True)


def test_a_sharded_checkpoint_is_exported_as_the_stage_left_it(folder: Path):
    checkpoint = folder / "runs/tuned/finetune/checkpoints/step-00000008"
    assert command("export", checkpoint, "--format", "torchvision", "--out", folder / "tuned.pth") == 0
    meta, state = import_file(folder / "tuned.pth")
    expected_meta, expected = load_model(folder / "runs/tuned/finetune/model")
    assert meta == expected_meta
    assert all(torch.equal(state[name], expected[name]) for name in expected)

    shard = next((folder / checkpoint / "deepspeed").glob("*optim_states.pt"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        command("export", checkpoint, "--format", "npz", "--out", folder / "tuned.npz")
    assert not (folder / "tuned.npz").exists()


def test_predict_reads_run_and_export_alike(folder: Path, capsys: pytest.CaptureFixture[str]):
    digits = load_digits()
    (folder / "pictures").mkdir()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        if label in (3, 8) and number < 60:
            image = Image.fromarray((pixels * 15.9).astype(np.uint8))
            image.save(folder / "pictures" / f"{number:02}-{label}.png")
    assert command("export", folder / "runs/tuned", "--format", "transformers", "--out", folder / "tuned-hf") == 0
    capsys.readouterr()
    answers = []
    for model in ("runs/tuned", "tuned-hf"):
        assert command("predict", folder / model, folder / "pictures", "--json") == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert len(answers[0]) == len(list((folder / "pictures").iterdir())) > 5
    for ours, theirs in zip(*answers, strict=True):
        assert ours["image"] == theirs["image"]
        assert [each["class"] for each in ours["predictions"]] == [each["class"] for each in theirs["predictions"]]
        for one, other in zip(ours["predictions"], theirs["predictions"], strict=True):
            assert one["probability"] == pytest.approx(other["probability"], abs=1e-5)


def test_a_recipe_of_another_model_is_refused_before_anything_starts(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=r"set gelu erf \(not tanh\), or leave model out"):
        command("run", "recipe.yaml", "name=other", f"model={MODEL}")
    with pytest.raises(UserError, match=r"swap_head\.model: nowhere/config\.json is missing"):
        command("run", "recipe.yaml", "name=other", "stages.swap_head.model=nowhere", "--dry-run")
    assert not (folder / "runs/other").exists()


def test_the_record_says_how_it_is_evaluated(folder: Path):
    meta = read_meta(folder / "runs/tuned/finetune/model")
    assert (meta.eval_protocol, meta.eval_crop_share) == ("vit", None)

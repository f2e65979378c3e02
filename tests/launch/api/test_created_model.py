"""`create_model`: sizes by name, and weights that keep what fits."""

from pathlib import Path
from typing import Any

import pytest
import torch

import shardvit
from shardvit.model.config import ModelConfig
from shardvit.model.init import initialise
from shardvit.model.positions.interpolation import resize_state
from shardvit.model.saved.model_folder import SavedModelMeta, save_model
from shardvit.model.vit import build_model

SMALL = {"width": 16, "depth": 2, "heads": 2, "patch_size": 8}
META = SavedModelMeta(model=ModelConfig(**SMALL), image_size=16, num_classes=3, class_names=("a", "b", "c"), head="mlp")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, torch.nn.Module]:
    network = build_model(META.model, image_size=16, num_classes=3, head="mlp")
    initialise(network, seed=7)
    with torch.no_grad():
        for parameter in network.parameters():  # the last layer, too, begins at zero
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)), alpha=0.1)
    save_model(tmp_path / "model", network.state_dict(), meta=META)
    return tmp_path / "model", network.eval()


def test_all_is_kept_where_nothing_changes(saved: tuple[Path, torch.nn.Module]):
    path, network = saved
    made, images = shardvit.create_model(SMALL, weights=path), torch.randn(2, 3, 16, 16)
    assert made.training
    assert torch.equal(made.eval()(images), network(images))


def test_positions_are_interpolated_and_the_head_replaced(saved: tuple[Path, torch.nn.Module]):
    path, network = saved
    made = shardvit.create_model(weights=path, image_size=32, num_classes=5)
    ours = made.state_dict()
    theirs = resize_state(network.state_dict(), config=META.model, from_image_size=16, to_image_size=32)
    trunk = [name for name in theirs if not name.startswith("head.")]
    assert len(trunk) > 10 and all(torch.equal(ours[name], theirs[name]) for name in trunk)
    assert made(torch.zeros(1, 3, 32, 32)).tolist() == [[0.0] * 5]


def test_a_seed_gives_the_weights(saved: tuple[Path, torch.nn.Module]):
    first, again, other = (shardvit.create_model(SMALL, image_size=16, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["blocks.0.attn.qkv.weight"], other["blocks.0.attn.qkv.weight"])


def test_it_has_timms_names():
    import timm

    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=32)
    shapes = {name: each.shape for name, each in theirs.state_dict().items()}
    ours = shardvit.create_model("Ti/16", num_classes=10, image_size=32)
    assert {name: each.shape for name, each in ours.state_dict().items()} == shapes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give a variant"),
        ({"model": "X/16"}, "variant 'X/16' is unknown"),
        ({"model": "B/16", "image_size": 30}, "30"),
        ({"model": {**SMALL, "widht": 3}}, "widht"),
        ({"model": "B/16", "weights": "model"}, "another model"),
        ({"weights": "nowhere"}, "nowhere is not there"),
    ],
)
def test_what_does_not_fit_is_a_users_mistake(
    saved: tuple[Path, torch.nn.Module], given: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(saved[0].parent)
    with pytest.raises(shardvit.UserError, match=said):
        shardvit.create_model(**given)

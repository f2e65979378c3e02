"""The model that a recipe takes from elsewhere must be the one that it describes; checked before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from data_shards.errors import UserError
from model.build import build_model
from model.config import ModelConfig
from model.saved import CONFIG_FILE, RECORD_KEY, WEIGHTS_FILE, SavedModelMeta, save_model
from pipeline.recipe.schema import Recipe
from pipeline.stage_model import model_from_elsewhere

SMALL = {"width": 16, "depth": 2, "heads": 2, "patch_size": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    meta = SavedModelMeta(
        model=ModelConfig(**SMALL, gelu="erf"), image_size=16, num_classes=2, class_names=("a", "b"), head="linear"
    )
    model = build_model(meta.model, image_size=16, num_classes=2, head="linear")
    save_model(tmp_path / "model", model.state_dict(), meta=meta)
    return tmp_path / "model"


def recipe(model: dict[str, Any], start: str | None, *, image_size: int = 16) -> Recipe:
    stage = {
        "train": "a/train",
        "eval": "a/val",
        "image_size": image_size,
        "global_batch_size": 8,
        "duration": "10 steps",
        "optimizer": {"name": "sgd", "lr": 0.1},
    }
    stages = {"swap_head": {"model": start}, "finetune": stage} if start else {"pretrain": stage}
    return Recipe.model_validate({"name": "r", "model": model, "stages": stages})


def test_the_same_trunk_is_accepted_however_it_is_written(folder: Path):
    for model in ({**SMALL, "gelu": "erf"}, {**SMALL, "mlp_dim": 64, "gelu": "erf", "pool": "cls"}):
        assert model_from_elsewhere(recipe(model, str(folder))) == folder
    assert model_from_elsewhere(recipe(SMALL, None)) is None


def test_another_trunk_is_refused_and_the_message_says_what_to_set(folder: Path):
    with pytest.raises(UserError, match=r"another model than the recipe's; under model, set depth 2 \(not 3\)"):
        model_from_elsewhere(recipe({**SMALL, "depth": 3, "gelu": "erf"}, str(folder)))
    with pytest.raises(UserError, match=r"set gelu erf \(not tanh\)"):
        model_from_elsewhere(recipe(SMALL, str(folder)))
    with pytest.raises(UserError, match="another model"):
        model_from_elsewhere(recipe({"variant": "Ti/16"}, str(folder)))


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"stages\.swap_head\.model: .*config\.json is missing"):
        model_from_elsewhere(recipe(SMALL, str(tmp_path)))


def test_a_folder_without_weights_is_refused(folder: Path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"stages\.swap_head\.model: .*model\.safetensors is missing"):
        model_from_elsewhere(recipe({**SMALL, "gelu": "erf"}, str(folder)))


def test_a_folder_is_relative_to_the_working_folder(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder.parent)
    assert model_from_elsewhere(recipe({**SMALL, "gelu": "erf"}, "model")) == Path("model")


def save(folder: Path, config: dict[str, Any]) -> None:
    """The record of a model; its weights, which nobody reads before a stage is started, are empty."""
    meta = SavedModelMeta(
        model=ModelConfig(**config), image_size=32, num_classes=2, class_names=("a", "b"), head="linear"
    )
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(json.dumps({RECORD_KEY: meta.model_dump(mode="json")}))
    (folder / WEIGHTS_FILE).touch()


def test_a_resnet_by_its_name_is_the_resnet_by_its_layers(tmp_path: Path):
    save(tmp_path / "named", {"variant": "R50x1"})
    by_layers = recipe({"resnet_layers": [3, 4, 6, 3]}, str(tmp_path / "named"), image_size=32)
    assert model_from_elsewhere(by_layers) == tmp_path / "named"
    with pytest.raises(UserError, match=r"under model, set resnet_layers \(3, 4, 6, 3\) \(not \(3, 4, 23, 3\)\)"):
        model_from_elsewhere(recipe({"variant": "R101x1"}, str(tmp_path / "named"), image_size=32))


def test_relative_positions_go_to_no_other_resolution(tmp_path: Path):
    relative = {**SMALL, "position": "relative"}
    save(tmp_path / "relative", relative)
    with pytest.raises(UserError, match=r"finetune\.image_size: relative .* is of 32 px: take 32, not 16"):
        model_from_elsewhere(recipe(relative, str(tmp_path / "relative")))
    assert model_from_elsewhere(recipe(relative, str(tmp_path / "relative"), image_size=32))

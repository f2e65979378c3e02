"""The model that a recipe takes from elsewhere must be the one that it describes; checked before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from data_shards.errors import UserError
from model.build import build_model
from model.config import ModelConfig
from model.saved import SavedModelMeta, save_model
from pipeline.recipe import Recipe
from pipeline.start_model import model_from_elsewhere

SMALL = {"width": 16, "depth": 2, "heads": 2, "patch_size": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    meta = SavedModelMeta(
        model=ModelConfig(**SMALL, gelu="erf"), image_size=16, num_classes=2, class_names=("a", "b"), head="linear"
    )
    model = build_model(meta.model, image_size=16, num_classes=2, head="linear")
    save_model(tmp_path / "model", model.state_dict(), meta=meta)
    return tmp_path / "model"


def recipe(model: dict[str, Any], start: str | None) -> Recipe:
    stage = {
        "train": "a/train",
        "eval": "a/val",
        "image_size": 16,
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

"""The model that a recipe takes from elsewhere must be the one that it describes; checked before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.vocabulary import Normalisation
from shardvit.model.config import ModelConfig
from shardvit.model.saved.model_folder import CONFIG_FILE, RECORD_KEY, WEIGHTS_FILE, SavedModelMeta, save_model
from shardvit.model.vit import build_model
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.stage.initial_model import begun_normalisation, check_kept_head, model_from_elsewhere
from tests.model.formats.small_model import described
from tests.small_recipe import small_recipe, small_stage

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
    stage = small_stage(image_size=image_size)
    stages = {"swap_head_": {"model": start}, "finetune_": stage} if start else {"pretrain_": stage}
    return Recipe.model_validate(small_recipe(model=model, **stages))


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


def test_a_kept_head_is_linear_and_of_the_same_classes_in_the_same_order():
    tree = small_recipe(pretrain_=small_stage(head="linear"), swap_head_={"head": "kept"}, finetune_=small_stage())
    kept = Recipe.model_validate(tree)
    check_kept_head(kept, before=("a", "b"), classes=("a", "b"))
    check_kept_head(
        Recipe.model_validate({**tree, "stages": {**tree["stages"], "swap_head": {}}}), before=(), classes="a"
    )
    for classes, head in ((("b", "a"), "linear"), (("a", "b"), "mlp")):
        with pytest.raises(UserError, match=r"stages\.swap_head\.head is kept, but .* set head to new"):
            check_kept_head(kept, before=("a", "b"), classes=classes, head=head)
    with pytest.raises(ValidationError, match=r"pretrain\.head is mlp: set pretrain\.head to linear"):
        Recipe.model_validate({**tree, "stages": {**tree["stages"], "pretrain": small_stage()}})


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"stages\.swap_head\.model: .*config\.json is missing"):
        model_from_elsewhere(recipe(SMALL, str(tmp_path)))


def test_a_folder_without_weights_is_refused(folder: Path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"stages\.swap_head\.model: .*model\.safetensors is missing"):
        model_from_elsewhere(recipe({**SMALL, "gelu": "erf"}, str(folder)))


def written(folder: Path, **keys: Any) -> str:
    stage = recipe({**SMALL, "gelu": "erf"}, str(folder)).model_dump(mode="json", exclude_defaults=True)
    (folder.parent / "recipe.yaml").write_text(
        yaml.safe_dump({key: value for key, value in (stage | keys).items() if value})
    )
    return str(folder.parent / "recipe.yaml")


def test_a_recipe_without_a_model_has_the_folders(folder: Path):
    assert load_recipe(written(folder, model=None)) == load_recipe(written(folder))
    other = written(folder, model={**SMALL, "depth": 3})
    assert load_recipe(other, overrides=["model=null"]).model == ModelConfig(**SMALL, gelu="erf")
    with pytest.raises(UserError, match=r"set depth 2 \(not 3\), gelu erf .*, or leave model out"):
        model_from_elsewhere(load_recipe(other))


def test_a_fine_tuning_set_is_cut_to_patches_of_the_folders_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path / "model", {**SMALL, "patch_size": 14}, image_size=28)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("{name: r, finetune: cifar10, stages: {swap_head: {model: model}}}")
    assert load_recipe("recipe.yaml").train_stage("finetune").image_size == 378


@pytest.mark.parametrize("change", ["model=nowhere", "model=recipe.yaml", "model=", "model=3"])
def test_a_model_that_neither_says_is_one_sentence(folder: Path, change: str):
    path = written(folder, model=None)
    with pytest.raises(UserError, match=r"swap_head\.model|model"):
        load_recipe(path, overrides=[f"swap_head.{change}"])


def test_a_folder_is_relative_to_the_working_folder(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder.parent)
    assert model_from_elsewhere(recipe({**SMALL, "gelu": "erf"}, "model")) == Path("model")


def save(folder: Path, config: dict[str, Any], *, image_size: int = 32) -> None:
    """The record of a model; its weights, which nobody reads before a stage is started, are empty."""
    meta = SavedModelMeta(
        model=ModelConfig(**config), image_size=image_size, num_classes=2, class_names=("a", "b"), head="linear"
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


def test_a_begun_stage_keeps_its_normalisation_whatever_the_statistics_say_by_now(tmp_path: Path):
    run = RunFolder(runs_root=tmp_path, name="r")
    run.path.mkdir()
    assert begun_normalisation(run, stage="pretrain") is None
    meta = described(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)).model_dump(mode="json", exclude_none=True)
    for step, kept in ((0, False), (3, True)):
        run.update("pretrain", state="running", last_saved_step=step, model=meta)
        found = begun_normalisation(run, stage="pretrain")
        assert found == (Normalisation((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)) if kept else None)


def test_relative_positions_go_to_no_other_resolution(tmp_path: Path):
    relative = {**SMALL, "position": "relative"}
    save(tmp_path / "relative", relative)
    with pytest.raises(UserError, match=r"finetune\.image_size: relative .* is of 32 px: take 32, not 16"):
        model_from_elsewhere(recipe(relative, str(tmp_path / "relative")))
    assert model_from_elsewhere(recipe(relative, str(tmp_path / "relative"), image_size=32))

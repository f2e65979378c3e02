"""Data sets by role: where the shards are comes from overrides or a file; what is missing is told."""

from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.recipe.io import differences, dump_recipe, load_recipe, parse_recipe
from shardvit.pipeline.recipe.roles import ROLES, missing_paths, read_paths
from shardvit.pipeline.runs.run_folder import recipe_digest
from shardvit.pipeline.stage.stage_data import open_data

PATHS = """
imagenet21k: {train: big/train, eval: big/val}
imagenet: {train: [one/train, {shards: two/train}], eval: {shards: one/val}}
"""


@pytest.fixture
def paths(tmp_path: Path) -> Path:
    (tmp_path / "paths.yaml").write_text(PATHS)
    return tmp_path / "paths.yaml"


def test_a_file_of_paths_fills_every_stage_and_overrides_come_first(paths: Path):
    recipe = load_recipe("vit_l16_in21k", overrides=["train=other"], paths=paths)
    pretrain, finetune = recipe.stages.pretrain, recipe.stages.finetune
    assert pretrain and finetune and pretrain.train and pretrain.eval and finetune.train and finetune.eval
    assert [pretrain.train[0].shards, pretrain.eval.shards] == ["other", "big/val"]
    assert [each.shards for each in finetune.train] == ["one/train", "two/train"]
    assert missing_paths(recipe, stage="pretrain") is missing_paths(recipe, stage="finetune") is None


def test_the_file_is_read_only_where_something_lacks(paths: Path, tmp_path: Path):
    assert load_recipe("digits", paths=tmp_path / "gone.yaml") == load_recipe("digits")
    recipe = load_recipe("vit_b16_in1k", paths=paths)
    (tmp_path / "resolved.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(str(tmp_path / "resolved.yaml"), paths=tmp_path / "gone.yaml") == recipe
    with pytest.raises(UserError, match=r"gone\.yaml cannot be read"):
        load_recipe("vit_b16_in1k", paths=tmp_path / "gone.yaml")


def test_the_resolved_recipe_has_the_paths_and_the_role_changes_nothing_that_is_learnt(paths: Path, tmp_path: Path):
    recipe = load_recipe("vit_b16_in1k", paths=paths)
    (tmp_path / "resolved.yaml").write_text(dump_recipe(recipe))
    assert parse_recipe(tmp_path / "resolved.yaml") == recipe
    other = load_recipe("vit_b16_in1k", overrides=["pretrain.data=mine", "train=x", "eval=y"], paths=paths)
    same = load_recipe("vit_b16_in1k", overrides=["train=x", "eval=y"], paths=paths)
    assert differences(other, same) == {}
    assert recipe_digest(other, stage="finetune") == recipe_digest(same, stage="finetune")


@pytest.mark.parametrize("name", ["vit_l16_in21k", "vit_b16_masked_jft"])
def test_a_recipe_without_its_shards_loads_and_says_what_is_missing(name: str, tmp_path: Path):
    recipe = load_recipe(name)
    (tmp_path / "resolved.yaml").write_text(dump_recipe(recipe))
    assert parse_recipe(tmp_path / "resolved.yaml") == recipe
    first = recipe.stages.names[0]
    role = recipe.train_stage(first).data
    with pytest.raises(UserError) as caught:
        open_data(recipe, stage=first)
    text = str(caught.value)
    assert f"stages.{first} is for {role}" in text and "train=SHARDS and eval=SHARDS" in text
    assert f"{role}: {{train: SHARDS, eval: SHARDS}}" in text and "shardvit pack" in text and "--data FILE" in text
    assert "finetune.train=SHARDS and finetune.eval=SHARDS" in (missing_paths(recipe, stage="finetune") or "")
    assert ("--holdout-images" in text) == (role in ("imagenet21k", "jft"))  # what pack makes has a part to evaluate on
    half = load_recipe(name, overrides=["train=x"])
    assert "give eval=SHARDS," in (missing_paths(half, stage=first) or "")


def test_a_role_that_is_nearly_one_is_answered():
    recipe = load_recipe("vit_b16_in1k", overrides=["pretrain.data=imagnet"])
    assert "did you mean imagenet?" in (missing_paths(recipe, stage="pretrain") or "")
    own = load_recipe("vit_b16_in1k", overrides=["pretrain.data=satellites"])
    assert "did you mean" not in (missing_paths(own, stage="pretrain") or "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a", "names no paths"),
        ("", "names no paths"),
        ("imagenet: shards/imagenet", "imagenet must be a group of keys"),
        ("imagenet: {}", "imagenet must be a group of keys"),
        ("imagenet: {trian: a}", "imagenet must be a group of keys"),
        ("imagnet: {train: a, eval: b}", "did you mean imagenet?"),
        ("3: {train: a}", "names no paths"),
        ("a: {", "is not valid YAML"),
    ],
)
def test_mistakes_in_the_file_are_one_sentence_that_names_it(tmp_path: Path, text: str, expected: str):
    file = tmp_path / "paths.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        read_paths(file)
    assert expected in str(caught.value) and str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_roles_of_the_users_own_are_taken(tmp_path: Path):
    (tmp_path / "paths.yaml").write_text("satellites: {train: a, eval: b}")
    recipe = load_recipe("vit_b16_in1k", overrides=["pretrain.data=satellites"], paths=tmp_path / "paths.yaml")
    assert recipe.stages.pretrain and recipe.stages.pretrain.train


def test_wrong_shards_in_the_file_are_named_by_the_key_they_are_for(tmp_path: Path):
    (tmp_path / "paths.yaml").write_text("imagenet: {train: 3, eval: b}")
    with pytest.raises(UserError, match=r"stages\.pretrain\.train is 3"):
        load_recipe("vit_b16_in1k", paths=tmp_path / "paths.yaml")


def test_the_published_sizes():
    assert (ROLES["imagenet21k"].images, ROLES["imagenet"].images) == (14_197_122, 1_281_167)
    assert {role.images for name, role in ROLES.items() if name.startswith("vtab")} == {1000}
    assert sum(name.startswith("vtab_") for name in ROLES) == 19

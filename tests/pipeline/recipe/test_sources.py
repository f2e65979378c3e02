"""A recipe made from several files: what extends what, which fine-tuning set lies below, and every mistake named."""

from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.recipe import sources
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.sources import find_recipe, finetune_sets, merge, read_source, shipped_recipes

BASE = """
name: base
model: {variant: B/16}
stages:
  pretrain: {data: imagenet, image_size: 224, global_batch_size: 8, duration: 10 steps, optimizer: {name: adamw, lr: 1}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "hot.yaml").write_text("stages: {pretrain: {optimizer: {lr: 2}, dropout: 0.1}}")
    (tmp_path / "hotter.yaml").write_text("stages: {pretrain: {optimizer: {lr: 3}}}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, text: str) -> str:
    (folder / "mine.yaml").write_text(text)
    return "mine.yaml"


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe("mine.yaml", overrides=overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_list_is_merged_in_its_order_and_the_file_itself_comes_last(folder: Path):
    recipe = load_recipe(write(folder, "extends: [base, hot, hotter]\nname: mine"))
    pretrain = recipe.stages.pretrain
    assert pretrain and (recipe.name, pretrain.optimizer.lr, pretrain.dropout) == ("mine", 3, 0.1)
    recipe = load_recipe(write(folder, "extends: [base, hotter, hot]\nstages: {pretrain: {dropout: 0}}"))
    assert recipe.stages.pretrain and (recipe.stages.pretrain.optimizer.lr, recipe.stages.pretrain.dropout) == (2, 0)
    assert [path.name for path in read_source(Path("mine.yaml")).files] == [
        *("base.yaml", "hotter.yaml", "hot.yaml", "mine.yaml")
    ]


def test_a_file_may_come_by_two_ways_but_not_from_itself(folder: Path):
    (folder / "hot.yaml").write_text("extends: base")
    assert load_recipe(write(folder, "extends: [base, hot]")).name == "base"
    (folder / "hot.yaml").write_text("extends: mine")
    assert "leads back to the recipe itself" in refusal()


def test_lists_of_lists_that_multiply_are_refused_at_once(folder: Path):
    for number in range(40):
        (folder / f"f{number}.yaml").write_text(f"extends: [f{number + 1}, f{number + 1}]\n")
    (folder / "f40.yaml").write_text(BASE)
    write(folder, "extends: f0")
    assert "consists of more than" in refusal()


def test_shipped_recipes_lie_in_folders_and_are_found_by_their_names(folder: Path):
    path = shipped_recipes()["vit_l16_in21k"]
    assert path.parent.name == "paper" and find_recipe("vit_l16_in21k", beside=Path()) == path
    assert load_recipe(write(folder, "extends: vit_l16_in21k\nname: mine")).model.variant == "L/16"
    assert find_recipe("paper/_in21k", beside=Path()).name == "_in21k.yaml"
    assert not any(name.startswith("_") for name in (*shipped_recipes(), *finetune_sets()))
    (folder / "vit_l16_in21k.yaml").write_text(BASE)
    assert load_recipe("vit_l16_in21k").name == "base"  # the user's own comes first
    with pytest.raises(UserError, match="did you mean vit_h14_in21k"):
        load_recipe("vit_h14_in21")


def test_the_set_lies_below_the_recipe_and_an_override_takes_another(folder: Path):
    write(folder, "extends: base\nfinetune: cifar10\nstages: {finetune: {optimizer: {lr: 0.5}}}")
    recipe = load_recipe("mine.yaml")
    finetune = recipe.stages.finetune
    assert finetune and recipe.stages.swap_head
    assert (finetune.data, finetune.duration, finetune.optimizer.lr) == ("cifar10", "10000 steps", 0.5)
    finetune = load_recipe("mine.yaml", overrides=["finetune=pets", "finetune.duration=7 steps"]).stages.finetune
    assert finetune and (finetune.data, finetune.duration, finetune.optimizer.lr) == ("pets", "7 steps", 0.5)
    for without in (["finetune=null"], ["finetune="]):
        assert load_recipe("mine.yaml", overrides=without).stages.names == ("pretrain",)
    write(folder, "extends: base\nfinetune: cifar10")
    (folder / "other.yaml").write_text("extends: mine\nfinetune: null\nname: other")
    assert load_recipe("other.yaml").stages.names == ("pretrain",)


def test_a_stage_without_a_set_is_replaced_whole_by_the_one_that_is_chosen():
    before = load_recipe("digits").stages.finetune
    after = load_recipe("digits", overrides=["finetune=cifar10"]).stages.finetune
    assert before and after
    assert (after.data, after.train, after.image_size, after.global_batch_size) == ("cifar10", None, 384, 512)
    assert after.log_every != before.log_every


@pytest.mark.parametrize(
    ("variant", "size"), [("B/16", 384), ("H/14", 378), ("B/32", 384), ("R50x1", 384), ("R50+L/32", 384), ("S/10", 380)]
)
def test_the_sets_image_size_is_cut_to_whole_patches_of_the_model_that_is_trained(
    folder: Path, variant: str, size: int
):
    write(folder, "extends: base\nfinetune: cifar10")
    overrides = [f"model.variant={variant}", "pretrain.image_size=1120"]
    finetune = load_recipe("mine.yaml", overrides=overrides).stages.finetune
    assert finetune and finetune.image_size == size
    assert "is not a multiple" in refusal("model.variant=H/14", "finetune.image_size=384")  # what the user says, stays


def test_a_set_may_be_a_file_of_the_users(folder: Path):
    (folder / "flowers2.yaml").write_text("extends: finetune/flowers\nstages: {finetune: {data: mine, image_size: 96}}")
    write(folder, "extends: base\nfinetune: flowers2")
    for recipe in (load_recipe("mine.yaml"), load_recipe("base.yaml", overrides=["finetune=flowers2.yaml"])):
        finetune = recipe.stages.finetune
        assert finetune and (finetune.data, finetune.image_size, finetune.duration) == ("mine", 96, "500 steps")


def test_what_a_set_says_of_the_model_counts(folder: Path):
    (folder / "pooled.yaml").write_text("extends: finetune/flowers\nmodel: {pool: gap}")
    write(folder, "extends: base\nfinetune: pooled")
    assert load_recipe("mine.yaml").model.pool == "gap"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["finetune=cifar"], "there is no fine-tuning set cifar, did you mean cifar1"),
        (["finetune=qqqqqq"], "no fine-tuning set qqqqqq: give the path of a YAML file, or one of cifar10, "),
        (["finetune=cifar10", "finetune=pets"], "override finetune is given twice"),
        (["finetune=3"], "finetune is the name of a fine-tuning set"),
        (["finetune={lr: 3}"], "finetune is the name of a fine-tuning set"),
        (["train=a", "stages.pretrain.train=b"], "override stages.pretrain.train is given twice"),
    ],
)
def test_mistakes_are_one_sentence(folder: Path, overrides: list[str], expected: str):
    write(folder, "extends: base")
    assert expected in refusal(*overrides)


def test_keys_of_stages_may_be_given_without_their_group(folder: Path):
    write(folder, "extends: base\nfinetune: cifar10")
    recipe = load_recipe("mine.yaml", overrides=["train=a", "eval=b", "finetune.train=c", "pretrain.optimizer.lr=0.25"])
    pretrain, finetune = recipe.stages.pretrain, recipe.stages.finetune
    assert pretrain and finetune and pretrain.train and pretrain.eval and finetune.train
    assert (pretrain.train[0].shards, pretrain.eval.shards, finetune.train[0].shards) == ("a", "b", "c")
    assert finetune.eval is None and pretrain.optimizer.lr == 0.25
    scratch = load_recipe("digits_scratch", overrides=["train=a"])  # whose first training stage is fine-tuning
    assert scratch.stages.finetune and scratch.stages.finetune.train
    assert scratch.stages.finetune.train[0].shards == "a"


def test_merging_changes_neither_tree():
    base, changes = {"a": {"b": 1}, "c": [1]}, {"a": {"d": 2}, "c": [2]}
    assert merge(base, changes) == {"a": {"b": 1, "d": 2}, "c": [2]}
    assert (base, changes) == ({"a": {"b": 1}, "c": [1]}, {"a": {"d": 2}, "c": [2]})


def test_files_of_shipped_recipes_are_all_used():
    used = {file for path in shipped_recipes().values() for file in read_source(path).files}
    used |= {file for path in finetune_sets().values() for file in read_source(path).files}
    unused = {path.stem for path in set(sources.SHIPPED.rglob("*.yaml")) - used}
    assert unused <= {"_medium1", "_strong1", "_strong2"}  # AugReg's levels, for a user to choose

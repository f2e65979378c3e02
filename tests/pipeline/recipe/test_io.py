"""Recipes from YAML and overrides: merged first, validated once, and every mistake named in one line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.recipe.io import (
    difference_to_parent,
    differences,
    dump_recipe,
    flatten,
    load_recipe,
    parse_recipe,
)
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.sources import read_header, read_source, shipped_recipes
from shardvit.pipeline.runs.run_folder import recipe_digest

TEXT = """
name: mine
model: {variant: Ti/4}
stages:
  pretrain:
    train: a/train
    eval: a/val
    image_size: 16
    global_batch_size: 8
    duration: 10 steps
    optimizer: {name: adamw, lr: 3e-4}
    augment: &same {flip: 0}
  swap_head: {}
  finetune:
    train: b/train
    eval: b/val
    image_size: 24
    global_batch_size: 8
    duration: 2 epochs
    optimizer: {name: sgd, lr: 0.03}
    augment: *same
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT)
    return path


def refusal(file: Path, *overrides: str) -> str:
    """The sentence of a refusal, which must be one line."""
    with pytest.raises(UserError) as caught:
        load_recipe(str(file), overrides=overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_loads_by_its_name_and_has_a_header(name: str):
    recipe = load_recipe(name)
    assert recipe.name == name.replace("_", "-")
    header = read_header(read_source(shipped_recipes()[name]).files, name=name)
    assert header.description
    for key in ("command", "hardware", "time", "result", "source"):
        assert header.entry(key), key
    assert "shardvit" in header.entry("command") or "make demo" in header.entry("command")


def test_numbers_that_yaml_takes_for_text_are_numbers(file: Path):
    assert load_recipe(str(file)).train_stage("pretrain").optimizer.lr == 3e-4  # YAML 1.1 reads 3e-4 as a string
    changed = load_recipe(str(file), overrides=["stages.pretrain.optimizer.lr=1e-5"])
    assert changed.train_stage("pretrain").optimizer.lr == 1e-5


def test_round_trip(file: Path, tmp_path: Path):
    for recipe in (load_recipe(str(file)), load_recipe("digits"), load_recipe("digits_scratch")):
        (tmp_path / "resolved.yaml").write_text(dump_recipe(recipe))
        again = parse_recipe(tmp_path / "resolved.yaml")
        assert again == recipe
        assert dump_recipe(again) == dump_recipe(recipe)
        assert differences(recipe, again) == {}
    assert "collective_timeout_seconds" in dump_recipe(load_recipe(str(file)))  # defaults are written out


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("stages.pretrain.optimizer.weight_decy=0.1", "did you mean weight_decay?"),
        ("stages.finetun={}", "unknown key stages.finetun, did you mean finetune?"),
        ("model.varient=B/16", "unknown key model.varient, did you mean variant?"),
        ("sed=1", "unknown key sed, did you mean seed?"),
        ("qqqqqq=1", "unknown key qqqqqq"),
        ("lr=1", "unknown key lr, did you mean stages.*.optimizer.lr?"),
        ("finetune.lr=1", "unknown key stages.finetune.lr, did you mean stages.finetune.optimizer.lr?"),
        ("optimizer.lr=1", "unknown key optimizer, did you mean stages.*.optimizer?"),
        ("variant=B/16", "unknown key variant, did you mean model.variant?"),
        ("stages.pretrain.image_size=18", "take 16 or 20"),
        ("stages.pretrain=3", "stages.pretrain"),
        ("stages.pretrain.augment.flip.x=3", "flip"),
        ("name.x=3", "'name' is a value, not a group of keys"),
        ("seed", "write key=value"),
        ("=3", "write key=value"),
        ("seed={", "override seed={ is not valid YAML"),
    ],
)
def test_a_wrong_override_is_one_sentence_that_names_the_key(file: Path, override: str, expected: str):
    assert expected in refusal(file, override)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("    image_size: 16\n", ""), "key stages.pretrain.image_size is missing"),
        (
            ("    image_size: 16\n", "    imagesize: 16\n"),
            "unknown key stages.pretrain.imagesize, did you mean image_size?",
        ),
        (("name: mine", "nmae: mine"), "unknown key nmae, did you mean name?"),
        (("name: mine", "name: [}"), "is not valid YAML"),
        (("name: mine", "extends: nowhere\nname: mine"), "there is no recipe nowhere"),
        ((TEXT, "- 1"), "holds no recipe"),
    ],
)
def test_a_wrong_file_is_one_sentence_that_names_the_file(file: Path, change: tuple[str, str], expected: str):
    file.write_text(TEXT.replace(*change) if change[0] else change[1])
    text = refusal(file)
    assert expected in text
    assert "mine.yaml" in text or "nowhere" in text


def test_a_file_beside_us_comes_before_a_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "digits.yaml").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    assert load_recipe("digits").name == "mine"


def test_overrides_make_groups_that_were_not_there_and_leave_the_rest(file: Path):
    plain = load_recipe(str(file))
    changed = load_recipe(str(file), overrides=["data.workers=3", "engine.zero_stage=2", "data.lanes=4", "seed=7"])
    assert (changed.data.workers, changed.engine.zero_stage, changed.data.lanes, changed.seed) == (3, 2, 4, 7)
    assert changed.stages == plain.stages


def test_an_override_changes_one_place_even_where_the_yaml_shares_it_by_an_alias(file: Path):
    recipe = load_recipe(str(file), overrides=["stages.finetune.augment.flip=0.5"])
    assert recipe.train_stage("finetune").augment.flip == 0.5
    assert recipe.train_stage("pretrain").augment.flip == 0


def test_null_removes_a_stage(file: Path):
    overrides = ["stages.pretrain=null", "stages.swap_head=null", "stages.finetune.start=scratch"]
    assert load_recipe(str(file), overrides=overrides).stages.names == ("finetune",)


def test_extends_changes_only_what_it_says(file: Path):
    child = file.parent / "child.yaml"
    child.write_text("extends: mine\nname: child\nstages: {finetune: {optimizer: {lr: 0.5}}}\n")
    grandchild = file.parent / "grandchild.yaml"
    grandchild.write_text("extends: child.yaml\nname: grandchild\nstages: {pretrain: {image_size: 32}}\n")
    changed = differences(load_recipe(str(file)), load_recipe(str(grandchild)))
    assert changed == {
        "name": "mine -> grandchild",
        "stages.pretrain.image_size": "16 -> 32",
        "stages.finetune.optimizer.lr": "0.03 -> 0.5",
    }
    shipped = file.parent / "other.yaml"
    shipped.write_text("extends: digits\nseed: 3\n")
    assert load_recipe(str(shipped)).seed == 3


def test_extends_in_a_circle_is_refused(file: Path):
    (file.parent / "a.yaml").write_text("extends: b\n")
    (file.parent / "b.yaml").write_text("extends: a\n")
    assert "'extends' leads back" in refusal(file.parent / "a.yaml")
    (file.parent / "c.yaml").write_text("extends: c\n")
    assert "'extends' leads back" in refusal(file.parent / "c.yaml")


FREE = [
    "processes=7",
    "data.workers=5",
    "engine.collective_timeout_seconds=9",
    *(f"stages.{stage}.{key}" for stage in ("pretrain", "finetune") for key in ("log_every=3 steps", "eval_every=9%")),
    "stages.pretrain.save_every=1 step",
    "stages.pretrain.keep_checkpoints=9",
]


@pytest.mark.parametrize("override", FREE)
def test_differences_pass_over_what_bears_on_no_result(file: Path, override: str):
    old, new = load_recipe(str(file)), load_recipe(str(file), overrides=[override])
    assert old != new
    assert differences(old, new) == {}


def test_differences_show_everything_else(file: Path):
    old = load_recipe(str(file))
    new = load_recipe(str(file), overrides=["seed=1", "stages.pretrain.optimizer.lr=0.5", "data.lanes=4", *FREE])
    assert differences(old, new) == {
        "seed": "0 -> 1",
        "data.lanes": "auto -> 4",
        "stages.pretrain.optimizer.lr": "0.0003 -> 0.5",
    }
    shorter = load_recipe(
        str(file), overrides=["stages.pretrain=null", "stages.swap_head=null", "stages.finetune.start=scratch"]
    )
    shown = differences(old, shorter)
    assert shown["stages.pretrain"] == "(absent) -> None"
    assert shown["stages.pretrain.image_size"] == "16 -> (absent)"


def test_flatten_has_one_text_for_each_leaf(file: Path):
    leaves = flatten(load_recipe(str(file)))
    assert leaves["stages.pretrain.optimizer.lr"] == "0.0003"
    assert leaves["stages.swap_head.model"] == "None"
    assert leaves["model.variant"] == "Ti/4"
    assert all(isinstance(value, str) for value in leaves.values())
    assert {key.split(".")[0] for key in leaves} == set(Recipe.model_fields)


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("pictures=off", lambda recipe: recipe.pictures == "off"),
        ("engine.compile=off", lambda recipe: recipe.engine.compile == "off"),
        ("tracking.system_metrics=off", lambda recipe: recipe.tracking.system_metrics is False),
        ("engine.activation_checkpointing=on", lambda recipe: recipe.engine.activation_checkpointing is True),
    ],
)
def test_on_and_off_are_words_and_truth_values_where_one_is_wanted(override: str, read: Callable[[Recipe], bool]):
    assert read(load_recipe("digits", overrides=[override]))


def test_the_difference_to_a_parent_has_each_key_that_is_said_otherwise(tmp_path: Path):
    parent, child = tmp_path / "parent.yaml", tmp_path / "child.yaml"
    parent.write_text(TEXT)
    child.write_text("extends: parent\nname: other\nstages: {pretrain: {augment: {flip: 0.5}, ema: {decay: 0.9}}}\n")
    said = difference_to_parent(str(child), overrides=["pretrain.optimizer.lr=0.5", "seed=3"]).splitlines()
    assert said[0] == "parent: parent" and dict(line.split(": ", 1) for line in said[1:]) == {
        "name": "mine -> other",
        "stages.pretrain.augment.flip": "0 -> 0.5",
        "stages.pretrain.ema.decay": "(absent) -> 0.9",
        "stages.pretrain.optimizer.lr": "0.0003 -> 0.5",
        "seed": "(absent) -> 3",
    }


def test_a_recipe_without_a_parent_differs_by_the_commands_changes(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text(TEXT)
    assert difference_to_parent(str(file)) == ""
    assert difference_to_parent(str(file), overrides=["seed=3"]) == f"parent: {file}\nseed: (absent) -> 3\n"
    said = difference_to_parent(str(file), overrides=["finetune=cifar10"]).splitlines()
    assert "finetune: (absent) -> cifar10" in said and "stages.finetune.image_size: 24 -> (absent)" in said


def test_a_run_folder_of_a_version_with_fp8_still_resumes(file: Path, tmp_path: Path):
    now = load_recipe(str(file))
    old = tmp_path / "recipe.yaml"
    old.write_text(dump_recipe(now).replace("\nengine:\n", "\nengine:\n  experimental:\n    fp8: 'off'\n"))
    assert "fp8" in old.read_text()
    before = parse_recipe(old)
    assert before == now
    assert not differences(before, now)
    assert recipe_digest(before, stage="finetune") == recipe_digest(now, stage="finetune")

"""Keywords are checked as the command line checks its flags, and recipes and overrides are given as Python values."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardvit
from shardvit.launch.api.options import options_of, recipe_of, texts_of
from shardvit.launch.commands.data.pack import PackOptions
from shardvit.launch.commands.models.evaluate import EvalOptions
from shardvit.launch.evaluation.transfer_options import MethodOptions, TransferOptions
from shardvit.pipeline.recipe.io import difference_to_parent, load_recipe


def test_values_become_what_the_command_line_makes_of_them():
    assert options_of(PackOptions, {"labels": "a.csv", "holdout": 0.1}) == PackOptions(
        labels=Path("a.csv"), holdout=0.1
    )
    assert options_of(EvalOptions, {"metrics": ["top5"]}).metrics == ("top5",)
    both = {"k": [1, 5], "layer": "pooled"}
    assert options_of(MethodOptions, both, beside=TransferOptions).k == (1, 5)
    assert options_of(TransferOptions, both, beside=MethodOptions).layer == "pooled"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hold_out": 0.1}, "did you mean holdout"),
        ({"xyzzy": 1}, "there are .*samples_per_shard"),
        ({"holdout": "much"}, "holdout: "),
        ({"superclasses": 3}, "superclasses: "),
    ],
)
def test_a_wrong_option_is_a_users_mistake(given: dict[str, Any], said: str):
    with pytest.raises(shardvit.UserError, match=said):
        options_of(PackOptions, given)


@pytest.mark.parametrize("name", ["json_file", "output", "force"])
def test_outputs_of_commands_are_no_options(name: str):
    with pytest.raises(shardvit.UserError, match=f"no option {name}"):
        options_of(EvalOptions, {name: True})


def test_overrides_say_python_values():
    texts = texts_of({"name": "a-b", "pretrain.optimizer.lr": 1e-05, "train": Path("x: y"), "seed": np.int64(3)})
    texts += texts_of({"model": {"width": 32, "depth": 1, "heads": 2, "patch_size": 4}, "processes": "auto"})
    loaded = load_recipe("digits", overrides=texts)
    stage = loaded.train_stage("pretrain")
    assert (loaded.name, loaded.seed, loaded.processes, loaded.model.width) == ("a-b", 3, "auto", 32)
    assert stage.optimizer.lr == 1e-05 and stage.train is not None and stage.train[0].shards == "x: y"


def test_a_recipe_of_keys_extends_and_overrides_as_a_file_does(tmp_path: Path):
    keys = {"extends": "digits", "name": "mine", "stages": {"finetune": {"duration": "2 epochs"}}}
    file = tmp_path / "mine.yaml"
    file.write_text("extends: digits\nname: mine\nstages: {finetune: {duration: 2 epochs}}\n")
    given = recipe_of(keys)
    assert load_recipe(given, overrides=["seed=3"]) == load_recipe(str(file), overrides=["seed=3"])
    assert difference_to_parent(given) == difference_to_parent(str(file))
    assert keys["extends"] == "digits", "the caller's own is not touched"


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ({"name": "x", "modle": 1}, "the recipe: .*did you mean model"),
        ({"extends": "digitz"}, "the recipe, extends: .*did you mean digits"),
        ({"name": {1, 2}}, "set is no value"),
        ({("a", "b"): 1}, "the recipe: "),
        ({}, "the recipe: "),
    ],
)
def test_a_wrong_recipe_of_keys_is_named(recipe: dict[Any, Any], said: str):
    with pytest.raises(shardvit.UserError, match=said):
        load_recipe(recipe_of(recipe))


def test_a_plan_takes_the_commands_options_and_overrides_together():
    plan = shardvit.plan("digits", gpus=2, gpu="h200", images=5000, classes="7", **{"engine.zero_stage": 2})
    assert plan.machine.gpus == 2 and plan.recipe.engine.zero_stage == 2
    assert {stage.shards.num_images for stage in plan.stages} == {5000}
    with pytest.raises(shardvit.UserError, match="gpuz"):
        shardvit.plan("digits", gpuz=2)

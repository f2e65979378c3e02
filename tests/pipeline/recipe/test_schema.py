"""The recipe's own rules: what does not fit together is refused, and the sentence says what to change."""

from copy import deepcopy
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.recipe.optimizer import OptimizerConfig, ScheduleConfig
from pipeline.recipe.schema import Recipe

TRAIN: dict[str, Any] = {
    "train": "a/train",
    "eval": "a/val",
    "image_size": 16,
    "global_batch_size": 8,
    "duration": "10 steps",
    "optimizer": {"name": "sgd", "lr": 0.1},
}
TREE: dict[str, Any] = {
    "name": "r",
    "model": {"width": 8, "depth": 1, "heads": 2, "patch_size": 4},
    "stages": {"pretrain": TRAIN, "swap_head": {}, "finetune": {**TRAIN, "image_size": 24}},
}


def tree(**changes: Any) -> dict[str, Any]:
    """TREE with dotted keys changed (dots written as `__`); a value of `...` removes the key."""
    changed = deepcopy(TREE)
    for key, value in changes.items():
        *parents, leaf = key.split("__")
        node = changed
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is ...:
            del node[leaf]
        else:
            node[leaf] = value
    return changed


def refusal(**changes: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        Recipe.model_validate(tree(**changes))
    return str(caught.value)


def test_a_whole_recipe_and_its_defaults():
    recipe = Recipe.model_validate(TREE)
    assert recipe.stages.names == ("pretrain", "swap_head", "finetune")
    assert recipe.engine.backend == "deepspeed" and recipe.engine.zero_stage == 1 and recipe.engine.precision == "bf16"
    assert recipe.train_stage("finetune").image_size == 24
    with pytest.raises(KeyError):
        recipe.train_stage("swap_head")


def test_lanes_divide_the_global_batch_whatever_it_is():
    for batch in range(1, 1030):
        recipe = Recipe.model_validate(tree(stages__pretrain__global_batch_size=batch))
        lanes = recipe.lanes(recipe.train_stage("pretrain"))
        assert batch % lanes == 0 and 1 <= lanes <= 256
        assert not any(batch % more == 0 for more in range(lanes + 1, 257))
    fixed = Recipe.model_validate(tree(data__lanes=3))
    assert fixed.lanes(fixed.train_stage("pretrain")) == 3
    assert fixed.lanes(fixed.train_stage("pretrain"), processes=1024) == 3


@pytest.mark.parametrize("batch", [4096, 32_768, 49_152, 3000])
def test_lanes_are_one_number_for_few_processes_and_one_for_many(batch: int):
    """So the order, and with it resuming, does not depend on their number on either side of 256."""
    recipe = Recipe.model_validate(tree(stages__pretrain__global_batch_size=batch))

    def lanes(processes: int) -> int:
        return recipe.lanes(recipe.train_stage("pretrain"), processes=processes)

    assert {lanes(processes) for processes in (1, 8, 100, 256)} == {lanes(1)}
    many = [processes for processes in range(257, 4097) if batch % processes == 0]
    assert many and all(batch % lanes(processes) == 0 == lanes(processes) % processes for processes in many)
    base = max(n for n in range(1, 4097) if batch % n == 0)
    assert {lanes(processes) for processes in many if base % processes == 0} == {base}


def test_an_image_size_that_is_no_multiple_of_the_patch_names_the_neighbours():
    text = refusal(stages__finetune__image_size=22)
    assert "stages.finetune.image_size: image size 22 is not a multiple of the patch size 4: take 20 or 24" in text
    assert "take 4" in refusal(stages__pretrain__image_size=3)
    for size in (20, 24):
        Recipe.model_validate(tree(stages__finetune__image_size=size))
    assert "patch size 16" in refusal(model={"variant": "B/16"}, stages__finetune__image_size=24)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": {}}, "at least one of masked_patch, pretrain, swap_head and finetune"),
        ({"stages__finetune": ...}, "swap_head comes before finetune"),
        ({"stages__pretrain": ...}, "swap_head needs a model"),
        ({"stages__swap_head__model": "imported"}, "swap_head.model and pretrain both"),
        ({"stages__pretrain__unmasked_finish": "1 epoch"}, "unmasked_finish means nothing"),
        (
            {"stages__pretrain__loss": "sigmoid", "stages__pretrain__label_smoothing": 0.5},
            "label_smoothing 0.5 inverts sigmoid's targets",
        ),
        ({"stages__finetune__init": "timm"}, "init means nothing to start swap_head"),
        ({"stages__finetune__optimizer__frozen": ["head"]}, "frozen names the head, which swap_head leaves at zero"),
        ({"stages__swap_head": ...}, "add one, or set start: scratch"),
        ({"stages__finetune__start": "scratch"}, "leave out swap_head"),
        ({"stages__pretrain__start": "scratch"}, "stages.pretrain.start"),
        ({"stages__finetune__head_bias": -10.0}, "stages.finetune.head_bias"),
        ({"stages__pretrain__augment": {"crop_area": [0.9, 0.1]}}, "crop_area"),
        ({"stages__pretrain__augment": {"crop_area": [0.0, 1.0]}}, "crop_area"),
        ({"stages__pretrain__augment": {"crop_ratio": [2, 1]}}, "crop_ratio"),
        ({"stages__pretrain__augment": {"flip": 1.5}}, "flip"),
        ({"stages__pretrain__optimizer__lr": 0}, "lr"),
        ({"stages__pretrain__optimizer__lr": float("inf")}, "lr"),
        ({"stages__pretrain__optimizer__lr": float("nan")}, "lr"),
        ({"stages__pretrain__optimizer__name": "adam"}, "adamw"),
        ({"stages__pretrain__duration": "soon"}, "400 steps"),
        ({"stages__pretrain__global_batch_size": 0}, "global_batch_size"),
        ({"engine__zero_stage": 4}, "zero_stage"),
        ({"engine": {"backend": "accelerate", "zero_stage": 3}}, "zero_stage means nothing to accelerate"),
        (
            {"engine": {"backend": "accelerate", "zero_stage": 0, "overlap": "on"}},
            "overlap means nothing to accelerate",
        ),
        ({"engine": {"backend": "accelerate", "bucket_elements": 1000}}, "bucket_elements means nothing to accelerate"),
        ({"engine": {"zero_stage": 0, "overlap": "off"}}, "overlap means nothing under ZeRO 0"),
        ({"engine": {"overlap": "yes"}}, "overlap"),
        ({"engine": {"bucket_elements": 0}}, "bucket_elements"),
        ({"engine": {"bucket_elements": 1001}}, "bucket_elements"),
        ({"engine": {"backend": "accelerate", "offload": "optimizer"}}, "offload means nothing to accelerate"),
        ({"engine": {"zero_stage": 0, "offload": "optimizer"}}, "set zero_stage to 1, 2 or 3"),
        ({"engine": {"zero_stage": 2, "offload": "optimizer_and_parameters"}}, "set zero_stage to 3, or offload"),
        ({"processes": 0}, "processes"),
        ({"processes": -2}, "processes"),
        ({"seed": -1}, "seed"),
        ({"name": "../elsewhere"}, "name"),
        ({"name": ".hidden"}, "name"),
        ({"name": ""}, "name"),
        ({"name": "a/b"}, "name"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str):
    assert message in refusal(**changes)


def test_a_recipe_cannot_be_changed_afterwards():
    recipe = Recipe.model_validate(TREE)
    with pytest.raises(ValidationError):
        recipe.seed = 1


@pytest.mark.parametrize(
    ("group", "key"),
    [
        ({"name": "sgd", "lr": 0.1, "betas": [0.8, 0.9]}, "betas"),
        ({"name": "adamw", "lr": 0.1, "momentum": 0.5}, "momentum"),
    ],
)
def test_a_setting_that_the_optimizer_would_ignore_is_refused(group, key):
    with pytest.raises(ValidationError, match=f"{key} means nothing"):
        OptimizerConfig.model_validate(group)


def test_an_end_that_a_constant_learning_rate_would_ignore_is_refused():
    with pytest.raises(ValidationError, match="end_lr means nothing"):
        ScheduleConfig.model_validate({"decay": "constant", "end_lr": 0.1})


OPTIMIZER: dict[str, Any] = {"name": "adamw", "lr": 0.1}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"momentum": 0.5}, "momentum means nothing to adamw"),
        ({"name": "sgd", "eps": 1e-3}, "eps means nothing to sgd"),
        ({"name": "lamb", "first_moment": "bf16"}, "first_moment means nothing to lamb"),
        ({"name": "adafactor", "betas": (0.8, 0.9)}, "betas means nothing to adafactor"),
        ({"weight_decay_unit": "schedule"}, "weight_decay_unit means nothing without decay"),
        ({"weight_decay_on": "matrices"}, "weight_decay_on means nothing without decay"),
        (
            {"name": "lamb", "weight_decay": 0.1, "weight_decay_unit": "schedule"},
            "weight_decay_unit means nothing to lamb",
        ),
        ({"frozen": ["trunk", "head"]}, "nothing is left to train"),
        ({"frozen": ["trunk"], "layer_decay": 0.5}, "layer_decay means nothing with a frozen trunk"),
        ({"frozen": ["head"], "head_lr_factor": 2}, "head_lr_factor means nothing to a frozen head"),
        ({"layer_decay": 0}, "layer_decay"),
        ({"head_lr_factor": 0}, "head_lr_factor"),
    ],
)
def test_an_optimizers_key_that_nothing_would_read_is_refused(keys: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=said):
        OptimizerConfig(**{**OPTIMIZER, **keys})


def test_an_optimizer_brings_its_own_defaults_and_a_given_value_wins():
    assert OptimizerConfig(name="muon", lr=0.1).momentum == 0.95
    assert OptimizerConfig(name="muon", lr=0.1, momentum=0.9).momentum == 0.9
    assert OptimizerConfig(name="lamb", lr=0.1).eps == 1e-6
    assert OptimizerConfig(name="adafactor", lr=0.1, first_moment="float32").first_moment == "float32"
    for config in (OptimizerConfig(name="muon", lr=0.1), OptimizerConfig(name="adafactor", lr=0.1)):
        assert OptimizerConfig.model_validate(config.model_dump(exclude_defaults=True)) == config


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"decay": "wsd"}, "ends in a cooldown"),
        ({"decay": "cosine", "cooldown": "10%"}, "cooldown means nothing to decay cosine"),
        ({"decay": "linear", "timescale": "5 steps"}, "timescale means nothing to decay linear"),
        ({"decay": "rsqrt", "end_lr": 1e-5}, "end_lr means nothing to rsqrt without a cooldown"),
        ({"decay": "rsqrt", "timescale": "0 steps"}, "timescale is zero"),
        ({"decay": "constant", "cooldown": "10%"}, "take decay wsd"),
    ],
)
def test_a_schedules_key_that_nothing_would_read_is_refused(keys: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=said):
        ScheduleConfig(**keys)


@pytest.mark.parametrize("name", ["adafactor", "lamb", "muon"])
def test_an_optimizer_of_whole_parameters_is_refused_to_zero_1_to_3(name: str):
    optimizer = {"name": name, "lr": 0.1}
    for stage in (1, 2, 3):
        said = refusal(stages__finetune__optimizer=optimizer, engine__zero_stage=stage)
        assert f"stages.finetune.optimizer.name: {name}" in said and "engine.zero_stage to 0" in said
    assert Recipe.model_validate(tree(stages__finetune__optimizer=optimizer, engine__zero_stage=0))
    assert Recipe.model_validate(tree(stages__finetune__optimizer=optimizer, engine__backend="accelerate"))

"""The recipe's rules for masked patch prediction: how it chains, and which keys mean nothing to it."""

from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.recipe.io import load_recipe
from pipeline.recipe.schema import Recipe
from pipeline.recipe.stage import MaskedPatchStage
from pipeline.runs.run_folder import recipe_digest

TRAIN: dict[str, Any] = {
    "train": "a/train",
    "eval": "a/val",
    "image_size": 16,
    "global_batch_size": 8,
    "duration": "10 steps",
    "optimizer": {"name": "adamw", "lr": 0.1},
}
MODEL: dict[str, Any] = {"width": 8, "depth": 1, "heads": 2, "patch_size": 4}


def recipe(*, model: dict[str, Any] = MODEL, masked_patch: dict[str, Any] = TRAIN, **stages: Any) -> Recipe:
    return Recipe.model_validate({"name": "r", "model": model, "stages": {"masked_patch": masked_patch, **stages}})


def refusal(**changes: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        recipe(**changes)
    return str(caught.value)


def test_it_comes_first_and_its_model_goes_on():
    whole = recipe(swap_head={}, finetune=TRAIN)
    assert whole.stages.names == ("masked_patch", "swap_head", "finetune")
    assert isinstance(whole.train_stage("masked_patch"), MaskedPatchStage)
    assert recipe().stages.names == ("masked_patch",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pretrain": TRAIN}, "masked_patch and pretrain both begin from random weights"),
        ({"finetune": TRAIN}, "there is no swap_head stage"),
        ({"swap_head": {}}, "swap_head comes before finetune"),
        ({"swap_head": {"model": "m"}, "finetune": TRAIN}, "swap_head.model and masked_patch both give the model"),
        ({"masked_patch": TRAIN | {"loss": "sigmoid"}}, "loss means nothing to masked patch prediction"),
        ({"masked_patch": TRAIN | {"label_smoothing": 0.1}}, "label_smoothing means nothing"),
        ({"masked_patch": TRAIN | {"patch_dropout": 0.5}}, "patch_dropout means nothing"),
        ({"masked_patch": TRAIN | {"augment": {"mixup_alpha": 0.2}}}, "augment.mixup_alpha means nothing"),
        ({"masked_patch": TRAIN | {"augment": {"cutmix_alpha": 1.0}}}, "augment.cutmix_alpha means nothing"),
        ({"masked_patch": TRAIN | {"head_bias": -10}}, "masked_patch.head_bias"),
        ({"masked_patch": TRAIN | {"image_size": 18}}, "masked_patch.image_size"),
        ({"masked_patch": TRAIN | {"image_size": 4}}, "4 pixels are a single patch"),
        (
            {"model": {"variant": "R50x1"}, "masked_patch": TRAIN | {"image_size": 64}},
            "a pure ResNet has no patch embeddings to corrupt",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str):
    assert message in refusal(**changes)


def test_what_shapes_the_trunk_and_the_images_is_allowed():
    extras = {"dropout": 0.1, "stochastic_depth": 0.1, "eval_protocol": "timm", "init": "timm"}
    augment = {"crop_area": [0.5, 1.0], "rand_augment": {"magnitude": 5}}
    stage = recipe(masked_patch=TRAIN | extras | {"augment": augment}).stages.masked_patch
    assert stage is not None and stage.dropout == 0.1 and stage.init == "timm"
    assert recipe(model={"variant": "R50+B/16"}, masked_patch=TRAIN | {"image_size": 64}).stages.masked_patch


def test_its_keys_are_in_the_digests_of_its_stage_and_of_those_that_build_on_it():
    first = recipe(swap_head={}, finetune=TRAIN)
    other = recipe(masked_patch=TRAIN | {"image_size": 24}, swap_head={}, finetune=TRAIN)
    later = recipe(swap_head={}, finetune=TRAIN | {"image_size": 24})
    for stage in ("masked_patch", "swap_head", "finetune"):
        assert recipe_digest(first, stage=stage) != recipe_digest(other, stage=stage)
    assert recipe_digest(first, stage="masked_patch") == recipe_digest(later, stage="masked_patch")


@pytest.mark.parametrize("name", ["cifar10_masked", "cifar10_masked_scratch"])
def test_the_recipes_that_ship_are_valid(name: str):
    assert load_recipe(name).stages.finetune


def test_the_comparison_has_the_same_fine_tuning():
    ours, scratch = load_recipe("cifar10_masked"), load_recipe("cifar10_masked_scratch")
    assert ours.stages.finetune and scratch.stages.finetune
    assert ours.stages.finetune == scratch.stages.finetune.model_copy(update={"start": "swap_head"})
    assert (ours.model, ours.seed, ours.engine) == (scratch.model, scratch.seed, scratch.engine)
    assert scratch.stages.names == ("finetune",)

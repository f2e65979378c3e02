"""The recipe's keys for compiled blocks, attention and TF32: what means nothing or cannot be is refused."""

from typing import Any

import pytest

from pipeline.recipe.schema import Recipe
from pipeline.runs.run_folder import recipe_digest
from tests.pipeline.recipe.test_schema import refusal, tree

RESNET = {"model": {"variant": "R50x1"}, "stages__pretrain__image_size": 32, "stages__finetune__image_size": 32}
DROPS = {"stages__pretrain__dropout": 0.1, "stages__pretrain__dropout_masks": "process"}
WIDE = {"model__width": 16}


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"engine": {"compile": "blocks", "zero_stage": 3}}, ["compile blocks", "zero_stage"]),
        ({"engine": {"compile": "blocks"}, **RESNET}, ["engine.compile", "ResNet"]),
        ({"engine": {"attention": "math"}, **RESNET}, ["engine.attention", "ResNet"]),
        ({"engine": {"compile": "blocks"}, **DROPS}, ["stages.pretrain.dropout_masks", "engine.compile"]),
        ({"engine": {"fp32_matmul": "tf32"}}, ["fp32_matmul", "bf16"]),
        ({"engine": {"attention": "flash"}, "model__position": "relative"}, ["engine.attention flash", "relative"]),
        ({"engine": {"attention": "cudnn"}, "model__position": "relative"}, ["engine.attention cudnn", "relative"]),
        ({"engine": {"attention": "fast"}}, ["attention"]),
        ({"engine": {"experimental": {"fp8": "rowwise"}}}, ["engine.experimental"]),
    ],
    ids=str,
)
def test_refused(changes: dict[str, Any], keys: list[str]) -> None:
    if "model__position" in changes:
        changes = {**changes, "stages__finetune__image_size": 16}
    said = refusal(**changes)
    assert all(key in said for key in keys), said


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": {"zero_stage": 3}},  # auto compiles nothing there
        {"engine": {"compile": "off", "zero_stage": 3}},
        {"engine": {"compile": "blocks", "zero_stage": 0, "attention": "efficient"}},
        {"engine": {"compile": "blocks", "backend": "accelerate"}},
        {"engine": {"compile": "blocks"}, "stages__pretrain__dropout": 0.1},
        {"engine": {"compile": "off"}, **DROPS},
        {"engine": {"experimental": {"fp8": "off"}}},  # in the run folders of earlier versions
        {"engine": {"fp32_matmul": "tf32", "precision": "fp32"}, **RESNET},
    ],
    ids=str,
)
def test_taken(changes: dict[str, Any]) -> None:
    assert Recipe.model_validate(tree(**changes))


def test_what_changes_speed_alone_may_change_between_attempts_and_what_changes_numbers_may_not() -> None:
    def digest(**engine: Any) -> str:
        return recipe_digest(Recipe.model_validate(tree(engine=engine, **WIDE)), stage="pretrain")

    plain = digest(precision="bf16")
    assert digest(compile="blocks") == digest(compile="off") == digest(attention="math") == plain
    assert digest(precision="fp32", fp32_matmul="tf32") != digest(precision="fp32")

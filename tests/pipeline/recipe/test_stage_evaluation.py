"""The recipe's keys of an evaluation: what means nothing is refused, and a default changes no digest."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.recipe.io import differences, flatten
from pipeline.recipe.schema import Recipe
from pipeline.runs.run_folder import recipe_digest


def recipe(*, stage: str = "pretrain", **keys: Any) -> Recipe:
    config = {
        **{"train": "a/train", "eval": "a/val", "image_size": 8, "global_batch_size": 8, "duration": "8 steps"},
        **{"optimizer": {"name": "adamw", "lr": 0.1}},
        **keys,
    }
    model = {"width": 8, "depth": 1, "heads": 2, "patch_size": 4}
    return Recipe.model_validate({"name": "r", "model": model, "stages": {stage: config}})


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"also_eval": {"val": "x"}}, "also_eval.val"),
        ({"hold_out": 1.0}, "less than 1"),
        ({"hold_out": "0.1"}, "hold_out"),  # text would wait for ever
        ({"hold_out": "1 %"}, "hold_out"),
        ({"hold_out": 0.1, "train": ["a", "b"]}, "hold_out is of one set"),
        ({"hold_out": 0.1, "train": {"shards": "a", "part": "rest", "hold_out": 0.1}}, "hold_out is of one set"),
        ({"also_eval": {"New Set": "x"}}, "New Set"),
        ({"also_eval": {"x": {"shards": "x", "weight": 2}}}, "weight"),
        ({"also_eval": {"x": {"shards": "a/train", "part": "held_out", "hold_out": 0.1}}}, "also_eval.x is held out"),
        ({"metrics": ["top5", "top5"]}, "top5 twice"),
        ({"metrics": ["mean_average_precision"]}, "mean_average_precision"),
        ({"metrics": ["f1"]}, "metrics"),
        ({"metrics": ["top5"], "stage": "masked_patch"}, "metrics means nothing"),
    ],
)
def test_what_means_nothing_is_refused(keys: dict[str, Any], names: str):
    with pytest.raises(ValidationError, match=names):
        recipe(**keys)


@pytest.mark.parametrize("as_list", [False, True])
def test_what_is_held_out_is_written_as_parts_of_the_training_set(as_list: bool):
    plain, train = recipe(train={"shards": "a", "label": "cls"}), {"shards": "a", "label": "cls", "hold_out": 0.1}
    parts = {"train": train | {"part": "rest"}, "also_eval": {"minival": train | {"part": "held_out"}}}
    one = {"shards": "a", "label": "cls"}
    short = recipe(train=[one] if as_list else one, hold_out=0.1)
    assert short == recipe(**parts) and differences(plain, short)
    assert Recipe.model_validate(short.model_dump(mode="json")) == short
    mine = recipe(hold_out=0.1, also_eval={"minival": "x", "y": "z"}).train_stage("pretrain").also_eval
    assert {name: each.shards for name, each in mine.items()} == {"minival": "x", "y": "z"}
    waiting = recipe(train=None, data="imagenet", hold_out=0.1)  # until its shards are named
    assert waiting.train_stage("pretrain").hold_out == 0.1 and not waiting.train_stage("pretrain").also_eval


def test_a_running_recipe_may_be_evaluated_in_other_ways():
    plain, more = recipe(), recipe(also_eval={"new": "x", "old": {"shards": "y", "label": "cls"}}, metrics=["top5"])
    assert differences(plain, more) == {} and recipe_digest(plain, stage="pretrain") == recipe_digest(
        more, stage="pretrain"
    )
    assert not any("also_eval" in key or "metrics" in key for key in flatten(plain, keys="changed"))
    assert recipe(metrics=["precision_at_1"], loss="sigmoid").train_stage("pretrain").metrics == ("precision_at_1",)
    again = Recipe.model_validate(more.model_dump(mode="json"))
    assert again == more

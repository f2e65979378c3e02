"""Images that grow during a stage: the sizes as a function of the step, the key as it is read and written, refusals."""

import pickle
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.size_phases import SizePhase, phase_at, size_at
from shardvit.pipeline.recipe.io import dump_recipe, flatten, load_recipe
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stage_plan import plan_stage
from shardvit.pipeline.recipe.stages.image_growth import GrowingSize, ImageGrowth, growth_of
from tests.small_recipe import SMALL, small_recipe, small_stage

GROWTH = {"from": 8, "to": 24, "over": "60%", "steps": 4}


def recipe(growth: Any = GROWTH, *, overrides: tuple[str, ...] = (), **more: Any) -> Recipe:
    stage = {"duration": "100 steps", **more.pop("stage", {})}
    model = {**SMALL, **more.pop("model", {})}
    return load_recipe(
        small_recipe(model=model, pretrain_=small_stage(image_size=growth, **stage), **more), overrides=overrides
    )


def phases(growth: Any = GROWTH, **stage: Any) -> tuple[SizePhase, ...]:
    plan = plan_stage(recipe(growth, stage=stage), stage="pretrain", samples_per_epoch=160, world_size=1)
    return plan.size_phases


def test_sizes_and_borders_are_those_counted_by_hand() -> None:
    assert phases() == tuple(map(SizePhase, (0, 15, 30, 45, 60), (8, 12, 16, 20, 24)))
    # 8 to 14 patches in 4 steps of 1.5, halves up; 7 steps in 4 phases begin at 0, 1.75, 3.5, 5.25
    growth = ImageGrowth.model_validate({"from": 128, "to": 224, "over": "7 steps", "steps": 4})
    assert growth.sizes(16) == (128, 160, 176, 208, 224)
    assert [each.first_step for each in growth.phases(16, over_steps=7, total_steps=9, key="k")] == [0, 2, 4, 6, 7]
    # EfficientNetV2's four equal stages, each a third of the way further
    thirds = ImageGrowth.model_validate({"from": 128, "to": 320, "over": "75%", "steps": 3})
    assert thirds.sizes(1) == (128, 192, 256, 320)


@given(less=st.integers(1, 40), more=st.integers(1, 40), steps=st.integers(1, 16), over=st.integers(16, 400))
def test_sizes_rise_from_the_first_to_the_last_and_every_phase_has_steps(
    less: int, more: int, steps: int, over: int
) -> None:
    steps = min(steps, more)
    growth = ImageGrowth.model_validate(
        {"from": 16 * less, "to": 16 * (less + more), "over": "9 steps", "steps": steps}
    )
    laid = growth.phases(16, over_steps=over, total_steps=over + 1, key="k")
    sizes = [each.image_size for each in laid]
    assert sizes == sorted(set(sizes)) and len(sizes) == steps + 1 and not any(size % 16 for size in sizes)
    assert sizes[0] == growth.from_ and sizes[-1] == growth.to
    lengths = [sum(phase_at(laid, step=step) == number for step in range(over)) for number in range(steps)]
    assert sum(lengths) == over and max(lengths) - min(lengths) <= 1
    assert size_at(laid, step=over) == growth.to == size_at(laid, step=10**9)


def test_everything_else_gets_the_last_size() -> None:
    size = recipe().train_stage("pretrain").image_size
    assert size == 24 and f"{size} {size:,}" == "24 24" and size // 4 == 6
    for copied in (pickle.loads(pickle.dumps(size)), recipe().model_copy(deep=True).train_stage("pretrain").image_size):
        assert growth_of(copied) == growth_of(size) and isinstance(copied, GrowingSize)
    assert growth_of(recipe(8).train_stage("pretrain").image_size) is None and phases(8) == ()


def test_a_recipe_that_is_written_is_read_back_and_an_override_replaces_the_key() -> None:
    text = dump_recipe(recipe())
    assert yaml.safe_load(text)["stages"]["pretrain"]["image_size"] == GROWTH
    assert flatten(load_recipe(yaml.safe_load(text))) == flatten(recipe())
    assert flatten(recipe())["stages.pretrain.image_size.from"] == "8"
    assert growth_of(recipe(overrides=("pretrain.image_size=16",)).train_stage("pretrain").image_size) is None
    grown = recipe(overrides=("pretrain.image_size.to=16", "pretrain.image_size.steps=2"))
    assert phases_of(grown) == [8, 12, 16]


def phases_of(given: Recipe) -> list[int]:
    return list(given.image_sizes("pretrain"))


@pytest.mark.parametrize(
    ("changes", "key", "word"),
    [
        ({"growth": {**GROWTH, "from": 24}}, "image_size", "from 24"),
        ({"growth": {**GROWTH, "from": 10}}, "image_size.from", "8 or 12"),
        ({"growth": {**GROWTH, "to": 26}}, "image_size", "24 or 28"),
        ({"growth": {**GROWTH, "steps": 5}}, "image_size.steps", "at most 4"),
        ({"growth": {**GROWTH, "steps": 0}}, "image_size.steps", "at least 1"),
        ({"growth": {**GROWTH, "steps": True}}, "image_size.steps", "true"),
        ({"growth": {**GROWTH, "every": 3}}, "image_size.every", "did you mean over"),
        ({"growth": {"from": 8}}, "image_size.to", "missing"),
        ({"growth": "big"}, "image_size", "'big'"),
        ({"growth": True}, "image_size", "true"),
        ({"model": {"position": "relative"}}, "image_size", "relative"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(changes: dict[str, Any], key: str, word: str) -> None:
    with pytest.raises(UserError, match=rf"stages.pretrain.{key}\b.*{word}"):
        recipe(changes.pop("growth", GROWTH), **changes)


@pytest.mark.parametrize("over", ["3 steps", "100 steps", "100%"])
def test_phases_that_do_not_fit_the_steps_are_refused(over: str) -> None:
    with pytest.raises(UserError, match=r"stages.pretrain.image_size.over takes"):
        phases({**GROWTH, "over": over})


def test_masked_patches_need_two_of_them_in_every_phase() -> None:
    stage = small_stage(image_size={**GROWTH, "from": 4})
    with pytest.raises(UserError, match=r"stages.masked_patch.image_size.from"):
        load_recipe(small_recipe(masked_patch_=stage))

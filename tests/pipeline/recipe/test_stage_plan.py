"""The arithmetic of a stage: what the batch is made of, and that each bad size is refused with values that fit."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.recipe.optimizer import Schedule
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stage_plan import StagePlan, plan_stage
from tests.small_recipe import small_recipe, small_stage


def recipe(*, most: int = 256, lanes: int | str = "auto", stage: dict[str, Any] | None = None) -> Recipe:
    keys = {"image_size": 16, "global_batch_size": 64, "duration": "100 steps", "optimizer": {"name": "sgd", "lr": 0.1}}
    tree = small_recipe(
        data={"lanes": lanes}, engine={"max_micro_batch_size": most}, pretrain_=small_stage(**keys | (stage or {}))
    )
    return Recipe.model_validate(tree)


def plan(*, world_size: int = 1, samples: int = 1000, **settings: Any) -> StagePlan:
    return plan_stage(recipe(**settings), stage="pretrain", samples_per_epoch=samples, world_size=world_size)


def refusal(**settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        plan(**settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@given(
    world_size=st.sampled_from([1, 2, 4, 8, 16]),
    images_each=st.integers(1, 300),
    most=st.integers(1, 300),
    data=st.data(),
)
def test_the_global_batch_is_what_its_parts_make(world_size: int, images_each: int, most: int, data: st.DataObject):
    batch = world_size * images_each
    lanes = data.draw(st.sampled_from([n for n in range(1, batch + 1) if batch % n == 0 and n % world_size == 0]))
    got = plan(world_size=world_size, samples=batch, most=most, lanes=lanes, stage={"global_batch_size": batch})
    assert got.world_size * got.accumulation_steps * got.micro_batch_size == got.global_batch_images == batch
    assert 1 <= got.micro_batch_size <= most
    # The fewest passes: every larger equal part would be above the limit.
    larger = [n for n in range(got.micro_batch_size + 1, images_each + 1) if images_each % n == 0]
    assert all(n > most for n in larger)
    assert got.lanes == lanes


def test_the_plan_of_a_known_recipe():
    got = plan(
        world_size=2,
        samples=1000,
        most=10,
        stage={
            "duration": "5 epochs",
            "schedule": {"warmup": "10%"},
            "log_every": "640 images",
            "eval_every": "1 epoch",
            "save_every": "0 steps",
            "keep_every": "50%",
        },
    )
    assert got == StagePlan(
        world_size=2,
        global_batch_images=64,
        micro_batch_size=8,
        accumulation_steps=4,
        lanes=64,
        total_steps=78,  # 5000 / 64 = 78.1
        schedule=Schedule(peak_lr=0.1, total_steps=78, warmup_steps=8, decay="cosine"),
        log_steps=10,
        eval_steps=16,  # 1000 / 64 = 15.6
        save_steps=0,
        samples_per_epoch=1000,
        keep_steps=39,
        max_skipped_steps=20,
    )
    text = got.describe()
    assert "64 = 2 processes x 4 micro-batches x 8 images" in text
    assert "78 steps = 4,992 images = 5.0 epochs" in text


def test_timescale_and_cooldown_are_lengths_like_the_others():
    schedule = {"decay": "rsqrt", "warmup": "10 steps", "timescale": "1 epoch", "cooldown": "20%", "end_lr": 0.01}
    got = plan(samples=1000, stage={"schedule": schedule}).schedule
    assert (got.timescale_steps, got.cooldown_steps, got.end_lr) == (16, 20, 0.01)  # 1000 / 64 = 15.6


def test_a_batch_that_does_not_divide_among_the_processes():
    text = refusal(world_size=3)
    assert "stages.pretrain.global_batch_size 64 does not divide among 3 processes: use a multiple of 3" in text


def test_lanes_too_many_for_repeats_of_an_image_are_refused():
    stage = {"global_batch_size": 24, "augment": {"repeats": 3}}
    assert "augment.repeats is 3" in refusal(lanes=8, stage=stage) and "data.lanes to 4" in refusal(
        lanes=8, stage=stage
    )
    assert plan(stage=stage).lanes == 2 and "each image 3 times in a batch" in plan(stage=stage).describe()


def test_lanes_that_do_not_divide_among_the_processes_name_the_numbers_that_do():
    text = refusal(world_size=3, lanes=4, stage={"global_batch_size": 12})
    assert "3 processes" in text and "data.lanes 4" in text
    advised = re.search(r"use one of ([\d, ]+) processes", text)
    assert advised
    for world_size in map(int, advised[1].split(", ")):
        plan(world_size=world_size, lanes=4, stage={"global_batch_size": 12})


def test_a_batch_that_is_no_multiple_of_the_lanes_names_the_nearest_that_are():
    text = refusal(lanes=24)
    assert "global_batch_size 64" in text and "data.lanes 24" in text
    assert "48 and 72" in text
    for batch in (48, 72):
        plan(lanes=24, stage={"global_batch_size": batch})


def test_a_batch_of_more_images_than_there_are_names_one_that_fits():
    """It would be accepted else, and 10 epochs would be three steps."""
    for samples, lanes, batch in ((30, "auto", 64), (30, 32, 64), (5, 6, 6), (2631, "auto", 8192)):
        text = refusal(samples=samples, lanes=lanes, stage={"global_batch_size": batch})
        assert f"stages.pretrain.global_batch_size is {batch:,}," in text and f"only {samples:,} images" in text
        advised = re.search(r"set it to (\d+)", text)
        assert advised
        plan(samples=samples, stage={"global_batch_size": int(advised[1])})
    plan(samples=64)


def test_more_lanes_than_images_names_a_number_of_lanes_that_fits():
    text = refusal(samples=30, lanes=32, stage={"global_batch_size": 16})
    assert "only 30 images" in text
    advised = re.search(r"set data.lanes to (\d+)", text)
    assert advised
    plan(samples=30, lanes=int(advised[1]), stage={"global_batch_size": 16})


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"duration": "10%"}, "stages.pretrain.duration: .* percentage: give steps, epochs or images"),
        ({"duration": "0 steps"}, "stages.pretrain.duration is zero"),
        ({"schedule": {"warmup": "100 steps"}}, "stages.pretrain.schedule.warmup takes 100 of 100 steps"),
        ({"schedule": {"warmup": "7 epochs"}}, "stages.pretrain.schedule.warmup takes 109 of 100 steps"),
        (
            {"schedule": {"decay": "wsd", "warmup": "60%", "cooldown": "50%"}},
            "stages.pretrain.schedule: warmup and cooldown take 60 and 50 of 100 steps",
        ),
        ({"patch_dropout": 0.5, "unmasked_finish": "100%"}, "unmasked_finish takes 100 of 100 steps, and nothing is"),
        ({"patch_dropout": 0.5, "unmasked_finish": "7 epochs"}, "unmasked_finish takes 109 of 100 steps"),
    ],
)
def test_lengths_that_do_not_fit_name_their_key(stage: dict[str, Any], message: str):
    assert re.search(message, refusal(stage=stage))


@pytest.mark.parametrize(
    ("stage", "masked_steps"),
    [
        ({}, 0),
        ({"patch_dropout": 0.5}, 100),
        ({"patch_dropout": 0.5, "unmasked_finish": "10%"}, 90),
        ({"patch_dropout": 0.5, "unmasked_finish": "99 steps"}, 1),
    ],
)
def test_patch_dropout_rests_for_the_finish(stage: dict[str, Any], masked_steps: int):
    assert plan(stage=stage).patch_dropout_steps == masked_steps


@given(
    total=st.integers(1, 3000),
    every=st.one_of(
        st.integers(0, 120).map(lambda percent: f"{percent}%"),
        st.integers(1, 3000).map(lambda steps: f"{steps} steps"),
        st.sampled_from(["1 epoch", "0.5 epochs", "7 epochs"]),
    ),
    samples=st.integers(64, 5000),
)
def test_evaluations_fall_on_multiples_and_on_the_end_and_never_twice_there(total: int, every: str, samples: int):
    got = plan(samples=samples, lanes=1, stage={"duration": f"{total} steps", "eval_every": every})
    found = [step for step in range(1, total + 1) if got.evaluates_after(step)]
    multiples = [step for step in range(1, total) if got.eval_steps and step % got.eval_steps == 0]
    assert found[-1] == total
    assert set(found[:-1]) <= set(multiples)
    left_out = [step for step in multiples if step not in found]
    assert len(left_out) <= 1 and multiples[-1:] in ([], left_out or multiples[-1:])  # none but the last one
    if len(found) > 1 and got.eval_steps > 1:
        assert found[-1] - found[-2] > max(1, got.eval_steps / 10 - 1)
    if left_out:
        assert total - left_out[0] <= max(1, got.eval_steps / 10)


@pytest.mark.parametrize(
    ("total", "every", "expected"),
    [
        (101, "25%", [25, 50, 75, 101]),
        (100, "33%", [33, 66, 100]),
        (13, "25%", [3, 6, 9, 13]),
        (60, "40%", [24, 48, 60]),
        (1040, "100 steps", [*range(100, 1001, 100), 1040]),  # as asked for, and not near the end
        (4, "1 step", [1, 2, 3, 4]),
        (9, "0%", [9]),
        (100, "25%", [25, 50, 75, 100]),
    ],
)
def test_where_evaluations_fall(total: int, every: str, expected: list[int]):
    got = plan(stage={"duration": f"{total} steps", "eval_every": every})
    assert [step for step in range(1, total + 1) if got.evaluates_after(step)] == expected


@pytest.mark.parametrize(
    ("batch", "world_size"), [(32_768, 1024), (4096, 1024), (32_768, 512), (49_152, 1536), (16_384, 4096)]
)
def test_a_thousand_processes_and_more_have_lanes_of_their_own(batch: int, world_size: int):
    got = plan(world_size=world_size, samples=10**9, stage={"global_batch_size": batch})
    assert got.micro_batch_size * got.accumulation_steps * world_size == batch
    assert got.lanes % world_size == 0 and batch % got.lanes == 0


def test_less_than_an_image_for_each_process_is_refused_with_the_numbers_that_fit():
    text = refusal(world_size=1024, samples=10**9, stage={"global_batch_size": 512})
    assert "stages.pretrain.global_batch_size is 512" in text and "multiple of 1024" in text and "512 processes" in text

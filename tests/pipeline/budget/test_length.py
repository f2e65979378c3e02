"""Batches and lengths where the recipe does not fit the number of GPUs, or the images are not counted yet."""

from shardvit.pipeline.budget.length import stage_length
from shardvit.pipeline.recipe.stage_plan import plan_stage
from tests.pipeline.budget.planning import IMAGES, forecast, recipe


def length(made, *, images: int | None = IMAGES, gpus: int = 8):
    return stage_length(made, stage="pretrain", num_images=images, processes=gpus)


def test_what_fits_is_planned_as_training_itself_does():
    made = recipe(stage={"duration": "90 epochs", "schedule": {"warmup": "5%"}})
    got = length(made)
    assert got.plan == plan_stage(made, stage="pretrain", samples_per_epoch=IMAGES, world_size=8)
    assert got.known and got.problem is None


def test_lanes_that_the_gpus_do_not_divide_are_a_problem_but_the_hours_are_counted():
    got = length(recipe(lanes=256), gpus=1024)
    assert got.known and got.problem and "data.lanes 256" in got.problem
    assert (got.plan.micro_batch_size, got.plan.accumulation_steps, got.plan.total_steps) == (4, 1, 1000)


def test_a_batch_that_does_not_divide_leaves_the_length_open_and_the_sizes_near():
    got = length(recipe(batch=4096), gpus=6)
    assert not got.known and got.problem and "does not divide among 6 processes" in got.problem
    assert abs(got.plan.micro_batch_size * got.plan.accumulation_steps * 6 - 4096) < 0.2 * 4096
    made = forecast(recipe(batch=4096), gpus=6)
    assert made.total_images is None and made.time and made.time.hours is None
    assert made.own.peak_bytes["all"] > 0


def test_steps_need_no_images_and_epochs_do():
    in_steps = length(recipe(stage={"eval_every": "1 epoch", "schedule": {"warmup": "1 epoch"}}), images=None)
    assert in_steps.known and in_steps.problem is None and in_steps.plan.total_steps == 1000
    in_epochs = length(recipe(stage={"duration": "90 epochs"}), images=None)
    assert not in_epochs.known and in_epochs.problem is None
    assert in_epochs.plan.micro_batch_size == 256 and in_epochs.plan.accumulation_steps == 2
    in_images = length(recipe(stage={"duration": "1e6 images"}), images=None)
    assert in_images.known and in_images.plan.total_steps == round(1e6 / 4096)


def test_other_mistakes_are_problems_too():
    got = length(recipe(stage={"schedule": {"warmup": "2000 steps"}}))
    assert not got.known and got.problem and "warmup takes 2000 of 1000 steps" in got.problem
    got = length(recipe(), images=100)
    assert got.problem and "only 100 images" in got.problem

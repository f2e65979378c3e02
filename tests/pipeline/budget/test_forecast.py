"""What the assembly of a stage's forecast adds to its parts: disk, and which traffic an engine has."""

from typing import Any

import pytest

from shardvit.pipeline.budget.forecast import GivenSpeed
from shardvit.pipeline.checkpoint.disk_space import estimate_bytes
from tests.pipeline.budget.planning import forecast, recipe


@pytest.mark.parametrize(
    ("stage", "most"),
    [
        ({}, 2 + 1),  # one is in the making
        ({"keep_checkpoints": 5}, 5 + 1),
        ({"keep_best": "loss"}, 2 + 1 + 1),
        ({"keep_every": "100 steps"}, 2 + 10 + 1),
        ({"keep_checkpoints": 1, "keep_every": "300 steps", "keep_best": "score"}, 1 + 3 + 1 + 1),
        ({"save_every": "20 steps", "rollback": {"steps_before": 97}}, 6 + 1),  # of steps 0, 20, ... 100
        ({"save_every": "20 steps", "keep_checkpoints": 9, "rollback": {"steps_before": 97}}, 9 + 1),
        ({"save_every": "400 steps", "rollback": {}}, 2 + 1),
    ],
)
def test_disk_for_what_is_kept_and_one_more(stage: dict[str, Any], most: int):
    made = recipe("B/16", stage=stage)
    disk = forecast(made).disk
    assert disk.most_checkpoints == most
    assert disk.checkpoint_bytes == estimate_bytes(
        86_567_656, engine=made.engine, optimizer=made.train_stage("pretrain").optimizer
    )
    assert disk.num_bytes == most * disk.checkpoint_bytes


def sent(engine: dict[str, Any], *, variant: Any = "B/16") -> float:
    made = forecast(recipe(variant, batch=256, engine=engine), gpus=2)  # nothing accumulated
    assert made.own.traffic
    return made.own.traffic.num_bytes / made.cost.parameters


def test_the_bytes_that_an_engine_sends_for_each_parameter():
    """On two GPUs half of: 4N of halves, 8N of float32; DDP averages float32 gradients, 8N, under autocast too."""
    assert sent({}) == sent({"zero_stage": 2}) == sent({"overlap": "off"}) == pytest.approx(2)
    assert sent({"precision": "fp32"}) == pytest.approx(4)
    assert sent({"precision": "fp16"}) == sent({"offload": "optimizer"}) == pytest.approx(3)  # DeepSpeed's all-reduce
    assert sent({"zero_stage": 0}) == pytest.approx(2)
    assert sent({"backend": "accelerate"}) == pytest.approx(4)
    assert sent({"zero_stage": 3}) == pytest.approx(2)
    assert sent({"zero_stage": 3}, variant="G/14") == pytest.approx(3)  # above 10^9: gathered twice
    made = forecast(recipe("B/16", batch=256, engine={"overlap": "off"}), gpus=2)
    assert made.own.traffic and made.own.traffic.bare_seconds == made.own.traffic.seconds


def test_every_zero_stage_has_a_row_and_the_recipes_own_is_the_forecasts():
    made = forecast(recipe("L/16", engine={"zero_stage": 2}), gpus=64)
    assert list(made.memory) == [0, 1, 2, 3] and made.own is made.memory[2]
    assert made.time and made.own.step_seconds == made.time.step_seconds
    assert made.time.images_per_second == pytest.approx(4096 / made.time.step_seconds)
    alone = forecast(recipe("L/16", engine={"backend": "accelerate"}), gpus=64)
    assert list(alone.memory) == [0]


def test_hours_are_the_steps_times_a_step():
    made = forecast(recipe("L/16", batch=1024), gpus=8, given=GivenSpeed(mfu=0.5))
    assert made.time and made.time.hours and made.time.gpu_hours
    assert made.time.hours == pytest.approx(1000 * made.time.step_seconds / 3600)
    assert made.time.gpu_hours == pytest.approx(8 * made.time.hours)
    assert made.total_images == 1000 * 1024


def test_the_peak_has_what_a_backward_pass_holds_for_a_moment():
    cost = forecast(recipe("B/16")).cost
    assert cost.image_bytes("all") - cost.activation_bytes == cost.working_bytes
    assert cost.working_bytes == pytest.approx(0.85 * 2 * 197 * 3072, rel=0.01)


@pytest.mark.parametrize(("name", "stages"), [("adafactor", {0}), ("lamb", {0, 1, 2}), ("muon", {0, 1, 2})])
def test_an_optimizer_of_whole_tensors_is_planned_for_the_stages_that_take_it(name, stages):
    made = forecast(recipe("B/16", engine={"zero_stage": 0}, stage={"optimizer": {"name": name, "lr": 0.1}}))
    assert set(made.memory) == stages
    assert set(forecast(recipe("B/16", engine={"zero_stage": 0})).memory) == {0, 1, 2, 3}

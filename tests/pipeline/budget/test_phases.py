"""The cost of images that grow: FLOPs of all phases against torch's counter, memory of the largest, hours of each."""

import functools
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardvit.pipeline.budget.cost import phase_costs
from shardvit.pipeline.budget.gpus import find_gpu
from shardvit.pipeline.budget.speed import anchored_speed
from shardvit.pipeline.recipe.stage_plan import plan_stage
from shardvit.pipeline.report.gauges import stage_work
from shardvit.pipeline.tracking.describe import plan_params
from shardvit.pipeline.training.stages import build_stage_model
from tests.pipeline.budget.planning import forecast, recipe

TINY = {"width": 32, "depth": 2, "heads": 2, "patch_size": 4}
GROWTH: Any = {"from": 8, "to": 24, "over": "60%", "steps": 4}
CLASSES, STEPS = 5, 20


def grown(growth: Any = GROWTH, **stage: Any) -> Any:
    return recipe(TINY, image_size=growth, batch=16, stage={"duration": f"{STEPS} steps", **stage})


def counted(made: Any, size: int, patch_dropout: float) -> int:
    """By the difference of two images and one: interpolating positions costs a step, not an image."""
    config, counts = made.stages.pretrain.model_copy(update={"patch_dropout": patch_dropout}), list[int]()
    with torch.device("meta"):
        model = build_stage_model(made, config, num_classes=CLASSES).train()
        for images in (1, 2):
            with FlopCounterMode(display=False) as counter:
                model(torch.empty(images, 3, size, size)).sum().backward()
            counts.append(counter.get_total_flops())
    return counts[1] - counts[0]


@pytest.mark.parametrize("dropout", [{}, {"patch_dropout": 0.5, "unmasked_finish": "50%", "dropout_masks": "process"}])
def test_the_sum_is_what_torch_counts_in_each_step(dropout: dict[str, Any]) -> None:
    made = grown(**dropout)
    plan = plan_stage(made, stage="pretrain", samples_per_epoch=160, world_size=1)
    work = stage_work(made, stage="pretrain", plan=plan, num_classes=CLASSES)
    torchs = functools.cache(functools.partial(counted, made))
    total = 0
    for step in range(STEPS):
        size = [each.image_size for each in plan.size_phases if each.first_step <= step][-1]
        flops = torchs(size, made.stages.pretrain.patch_dropout if step < plan.patch_dropout_steps else 0.0)
        assert work.of_image(step + 1) == flops, step
        total += flops
    params = plan_params(made, "pretrain", plan=plan, classes=CLASSES)
    assert int(params["cost.training_flops"]) == 16 * total == 16 * STEPS * work.mean(1, STEPS)
    assert params["plan.image_sizes"].startswith("8 px from step 0, 12 px from step 3,")


def test_memory_is_that_of_the_largest_images_and_hours_are_those_of_each_phase() -> None:
    small = {"from": 128, "to": 224, "over": "60%", "steps": 3}
    ours, last, first = (forecast(recipe("B/16", image_size=size)) for size in (small, 224, 128))
    assert ours.image_bytes == last.image_bytes and ours.own == last.own and ours.cost == last.cost
    assert [each.image_size for each in ours.phases] == [128, 160, 192, 224] and last.phases == ()
    assert [each.steps for each in ours.phases] == [200, 200, 200, 400]
    assert ours.phases[0].training_flops == first.cost.training_flops
    assert ours.time and last.time and ours.reading and last.reading and ours.ahead and last.ahead
    assert ours.time.hours == pytest.approx(sum(each.steps * (each.step_seconds or 0) for each in ours.phases) / 3600)
    share = sum(each.steps * each.training_flops for each in ours.phases) / (1000 * last.cost.training_flops)
    assert (ours.time.hours or 0) / (last.time.hours or 1) == pytest.approx(share, rel=1e-3)
    # readers must keep up with the fastest phase
    assert ours.reading.images_per_second > 2 * last.reading.images_per_second
    assert ours.ahead.workers > last.ahead.workers and ours.ahead.page_locked_bytes == last.ahead.page_locked_bytes


def test_workers_are_chosen_for_the_smallest_images() -> None:
    gpu = find_gpu("h200")
    speeds = [
        anchored_speed(recipe("B/16", image_size=size), stage="pretrain", num_classes=9, gpu=gpu)[0]  # pyright: ignore
        for size in ({"from": 128, "to": 224, "over": "60%", "steps": 3}, 128)
    ]
    assert speeds[0] == speeds[1]


def test_a_stage_without_growth_has_one_phase() -> None:
    made = grown(24)
    plan = plan_stage(made, stage="pretrain", samples_per_epoch=160, world_size=1)
    assert plan.size_phases == () and list(phase_costs(made, stage="pretrain", plan=plan, num_classes=5)) == [0]
    assert "plan.image_sizes" not in plan_params(made, "pretrain", plan=plan, classes=CLASSES)

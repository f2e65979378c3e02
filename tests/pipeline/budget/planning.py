"""Recipes and forecasts for the tests of the budget."""

from typing import Any

from shardvit.pipeline.budget.communication import links_of
from shardvit.pipeline.budget.forecast import GivenSpeed, Hardware, Shards, StageForecast, forecast_stage
from shardvit.pipeline.budget.gpus import find_gpu
from shardvit.pipeline.budget.length import stage_length
from shardvit.pipeline.recipe.optimizer import Schedule
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stage_plan import StagePlan
from tests.small_recipe import small_recipe, small_stage

IMAGES = 1_281_167


def recipe(
    variant: str | dict[str, Any] = "L/16",
    *,
    image_size: int = 224,
    batch: int = 4096,
    lanes: int | str = "auto",
    engine: dict[str, Any] | None = None,
    stage: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
) -> Recipe:
    """One stage of pre-training with a linear head."""
    keys = {"image_size": image_size, "global_batch_size": batch, "duration": "1000 steps", "head": "linear"}
    tree = small_recipe(
        "planned",
        model={"variant": variant} if isinstance(variant, str) else variant,
        data={"lanes": lanes, **(data or {})},
        engine=engine or {},
        pretrain_=small_stage(**keys, optimizer={"name": "adamw", "lr": 0.001}) | (stage or {}),
    )
    return Recipe.model_validate(tree)


def forecast(
    made: Recipe,
    *,
    gpus: int = 1,
    gpu: str | None = "h200",
    classes: int = 1000,
    shards: Shards | None = None,
    given: GivenSpeed | None = None,
) -> StageForecast:
    """Of the recipe's `pretrain`."""
    kind = find_gpu(gpu) if gpu else None
    links = links_of(kind, gpus_per_node=8, node_gbps=None) if kind else None
    known = shards or Shards(IMAGES, classes)
    return forecast_stage(
        made,
        stage="pretrain",
        length=stage_length(made, stage="pretrain", num_images=known.num_images, processes=gpus),
        shards=known,
        machine=Hardware(gpus, kind, links),
        given=given or GivenSpeed(),
    )


def stage_plan(*, processes: int = 1, accumulation: int = 1, micro_batch: int = 64) -> StagePlan:
    """Sizes alone."""
    return StagePlan(
        world_size=processes,
        global_batch_images=processes * accumulation * micro_batch,
        micro_batch_size=micro_batch,
        accumulation_steps=accumulation,
        lanes=processes,
        total_steps=1000,
        schedule=Schedule(),
        samples_per_epoch=IMAGES,
    )

"""Count a stage's batches and steps, even if GPUs do not fit the recipe or the data set's size is unknown."""

from dataclasses import dataclass

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.recipe.duration import parse_duration
from shardvit.pipeline.recipe.optimizer import Schedule
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stage_plan import StagePlan, plan_stage
from shardvit.pipeline.recipe.stages.image_growth import growth_of
from shardvit.pipeline.recipe.vocabulary import StageName

_ANY_IMAGES = 10**9  # placeholder for an unknown number on which nothing depends


@dataclass(frozen=True)
class Length:
    """A stage's batches and length, as far as known."""

    plan: StagePlan  # as in training, or the nearest if there is a `problem`
    problem: str | None = None  # why the stage cannot run on this many processes
    known: bool = True  # the number of steps is exact


def stage_length(recipe: Recipe, *, stage: StageName, num_images: int | None, processes: int) -> Length:
    """Plan a stage with `num_images` training images (None: unknown)."""
    known = num_images is not None or not _in_epochs(recipe.train_stage(stage).duration)
    if num_images is None:
        recipe, num_images = _without_epochs(recipe, stage=stage), _ANY_IMAGES
    with_lanes = recipe.model_copy(update={"data": recipe.data.model_copy(update={"lanes": processes})})
    problem = None
    for each in (recipe, with_lanes):  # maybe only the lanes do not fit
        try:
            plan = plan_stage(each, stage=stage, samples_per_epoch=num_images, world_size=processes)
        except UserError as error:
            problem = problem or str(error)
        else:
            return Length(plan, problem, known)
    batch = recipe.train_stage(stage).global_batch_size
    micro_batch = min(max(1, batch // processes), recipe.engine.max_micro_batch_size)
    accumulation = max(1, round(batch / processes / micro_batch))
    plan = StagePlan(
        world_size=processes,
        global_batch_images=micro_batch * accumulation * processes,
        micro_batch_size=micro_batch,
        accumulation_steps=accumulation,
        lanes=processes,
        total_steps=1,
        schedule=Schedule(),
        samples_per_epoch=num_images,
    )
    return Length(plan, problem, known=False)


def _in_epochs(duration: str) -> bool:
    return parse_duration(duration).unit == "epochs"


def _without_epochs(recipe: Recipe, *, stage: StageName) -> Recipe:
    """Replace epochs, which need the number of images, by steps."""
    config = recipe.train_stage(stage)
    keys = ("unmasked_finish", "log_every", "eval_every", "save_every", "keep_every")
    changes: dict[str, object] = {key: "0 steps" for key in keys if _in_epochs(getattr(config, key))}
    if _in_epochs(config.duration):
        changes["duration"] = "1000000 steps"
    if (growth := growth_of(config.image_size)) and _in_epochs(growth.over):
        changes["image_size"] = growth.to
    if _in_epochs(config.schedule.warmup):
        changes["schedule"] = config.schedule.model_copy(update={"warmup": "0 steps"})
    stages = recipe.stages.model_copy(update={stage: config.model_copy(update=changes)})
    return recipe.model_copy(update={"stages": stages})

"""What a stage says of itself before its first step: sizes, cost, damage, and what was restored. Rank 0's lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from model.counting.flops import account
from model.vocabulary import HeadKind
from pipeline.budget.cost import stage_cost
from pipeline.checkpoint.identity import checkpoint_identity
from pipeline.checkpoint.note import describe_changes, describe_restored
from pipeline.checkpoint.store import Restored
from pipeline.ranks.place import Place
from pipeline.recipe.schema import Recipe
from pipeline.recipe.stage_plan import StagePlan
from pipeline.recipe.vocabulary import StageName
from pipeline.runs.written_by import written_by
from pipeline.stage.data import StageData, cache_advice, training_order
from pipeline.stage.task import Task


def describe_start(
    recipe: Recipe,
    *,
    stage: StageName,
    place: Place,
    data: StageData,
    plan: StagePlan,
    task: Task,
    head: HeadKind | Literal["masked_patch"],
    notes: Sequence[str],
    restored: Restored | None,
) -> Iterator[str]:
    """The lines, in order; `notes`: of the kernels."""
    config = recipe.train_stage(stage)
    yield f"{stage}: {config.image_size} px, {len(task.outputs)} {task.kind_of_output}; {plan.describe()}"
    if head != "masked_patch":
        cost = account(
            recipe.model,
            image_size=config.image_size,
            num_classes=len(task.outputs),
            head=head,
            patch_dropout=config.patch_dropout,
            checkpointed_every=recipe.engine.checkpointed_every or 1,
        )
        kept = "checkpointed" if recipe.engine.checkpointed_every else "all"
        own = stage_cost(recipe.model, stage=config, engine=recipe.engine, num_classes=len(task.outputs))
        held = (own.activation_bytes, own.checkpointed_activation_bytes)
        cost = replace(cost, activation_bytes=held[0], checkpointed_activation_bytes=held[1])
        yield f"{stage}: {cost.describe(activations=kept, precision=recipe.engine.precision)}"
    yield from (f"{stage}: {note}" for note in notes)
    yield from (*data.train.damage, *(line for one in data.held_out.values() for line in one.damage))
    if advice := cache_advice(recipe, data=data, plan=plan, processes_per_node=place.local_world_size):
        yield advice
    if restored is None:
        return
    yield describe_restored(
        restored,
        plan=plan,
        order=training_order(recipe, data=data, plan=plan),
        shards=data.train,
        lr=plan.schedule(restored.state.step),
    )
    identity = checkpoint_identity(recipe, stage=stage, processes=place.world_size)
    if changes := describe_changes(restored, recipe=recipe, identity=identity, written_by=written_by()):
        yield changes

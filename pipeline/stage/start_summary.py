"""Summarise a stage on rank 0 before its first step: sizes, cost, damage, and what was restored."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardvit.data_shards.errors import UserError
from shardvit.model.counting.flops import account
from shardvit.pipeline.budget.cost import stage_cost
from shardvit.pipeline.checkpoint.identity import checkpoint_identity
from shardvit.pipeline.checkpoint.store import Restored
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.recipe.io import flatten, parse_recipe
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stages.image_growth import shown
from shardvit.pipeline.runs.written_by import changed_since, written_by
from shardvit.pipeline.stage.stage_data import Stage, cache_advice
from shardvit.pipeline.stage.task import Task

_LAYOUT = {"processes": "processes", "zero_stage": "ZeRO stage"}


def describe_start(
    stage: Stage, *, place: Place, task: Task, notes: Sequence[str], restored: Restored | None
) -> Iterator[str]:
    """Describe the stage line by line; `notes`: about kernels."""
    recipe, config, data, plan = stage.recipe, stage.config, stage.data, stage.plan
    engine, head, count = recipe.engine, config.head_kind, len(task.outputs)
    outputs = task.kind_of_output if head == "masked_autoencoder" else f"{count} {task.kind_of_output}"
    yield f"{stage.name}: {shown(config.image_size)}, {outputs}; {plan.describe()}"
    if plan.size_phases:
        yield f"{stage.name}: images grow: {plan.describe_sizes()}; evaluated at {config.image_size} px"
    if head == "mlp" or head == "linear":
        cost = account(
            recipe.model,
            image_size=config.image_size,
            num_classes=count,
            head=head,
            patch_dropout=config.patch_dropout,
            checkpointed_every=engine.checkpointed_every or 1,
        )
        own = stage_cost(recipe.model, stage=config, engine=engine, num_classes=count)
        cost = replace(
            cost,
            activation_bytes=own.activation_bytes,
            checkpointed_activation_bytes=own.checkpointed_activation_bytes,
        )
        kept = "checkpointed" if engine.checkpointed_every else "all"
        yield f"{stage.name}: {cost.describe(activations=kept, precision=engine.precision)}"
    yield from (f"{stage.name}: {note}" for note in notes)
    for one in (data.train, *data.held_out.values()):
        yield from one.damage
    if advice := cache_advice(recipe, data=data, plan=plan, processes_per_node=place.local_world_size):
        yield advice
    if restored is None:
        return
    yield from describe_restored(restored, stage=stage)
    identity = checkpoint_identity(recipe, stage=stage.name, processes=place.world_size)
    if changes := describe_changes(restored, recipe=recipe, identity=identity, written_by=written_by()):
        yield changes


def describe_restored(restored: Restored, *, stage: Stage) -> Iterator[str]:
    """Describe damaged checkpoints that were skipped, then the position and age of the restored one."""
    state, plan = restored.state, stage.plan
    age_minutes = (time.time() - restored.folder.stat().st_mtime) / 60
    position = "nothing is left to train"
    if state.step < plan.total_steps:
        first = stage.order().rank_batch(state.step, rank=0, world_size=1, start=0, stop=1)
        shard, row = int(first.shard[0]), int(first.row[0])
        name, lr = Path(stage.data.train.shards[shard].url).name, plan.schedule(state.step)
        position = f"the next image is number {row} of {name}, learning rate {lr:.3g}"
    yield from restored.notes
    yield (
        f"resuming from {restored.folder}, {max(0.0, age_minutes):.0f} minutes old: step {state.step:,} of "
        f"{plan.total_steps:,}, {state.images_seen:,} images seen, epoch "
        f"{state.images_seen / plan.samples_per_epoch:.2f}; {position}; {state.skipped_steps} steps skipped so "
        "far; weights, optimizer and loss scale are restored, random numbers are functions of seed and step"
    )


def describe_changes(
    restored: Restored, *, recipe: Recipe, identity: Mapping[str, Any], written_by: Mapping[str, str]
) -> str | None:
    """Describe changes from the checkpoint to this process (the other arguments); None: no change."""
    before = restored.identity
    layout = [
        f"{name} {before[key]} -> {identity[key]}" for key, name in _LAYOUT.items() if before[key] != identity[key]
    ]
    changes = [*layout, *changed_since(restored.written_by, written_by), *_changed_keys(restored.folder, recipe)]
    if not changes:
        return None
    text, masks = f"changed since that checkpoint was written: {', '.join(changes)}", ""
    if recipe.train_stage(identity["stage"]).dropout_masks == "process":
        masks = ", dropout draws other masks (dropout_masks: process)"
    digits = "losses may differ from an uninterrupted run's in the last digits"
    return f"{text} (weights and optimizer state are the same; {digits}{masks})" if layout else text


def _changed_keys(folder: Path, recipe: Recipe) -> list[str]:
    try:
        before = flatten(parse_recipe(folder / "recipe.yaml"))
    except (OSError, UserError):  # the digests matched, so another version of shardvit wrote it
        return []
    now = flatten(recipe)
    return [
        f"{key} {before.get(key, '(absent)')} -> {now[key]}"
        for key in now
        if before.get(key) != now[key] and key not in ("processes", "engine.zero_stage", "name", "experiment")
    ]

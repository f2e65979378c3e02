"""What was restored and what has changed since, for the screen."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_shards.errors import UserError
from data_shards.order.mixture import AnyOrder
from data_shards.shards.shard_set import ShardSet
from pipeline.checkpoint.store import Restored
from pipeline.recipe.io import flatten, parse_recipe
from pipeline.recipe.schema import Recipe
from pipeline.recipe.stage_plan import StagePlan
from pipeline.runs.written_by import changed_since

_LAYOUT = {"processes": "processes", "zero_stage": "ZeRO stage"}


def describe_restored(restored: Restored, *, plan: StagePlan, order: AnyOrder, shards: ShardSet, lr: float) -> str:
    """What was restored, a line each: damaged checkpoints that were skipped, then position and age.
    `order` and `shards` are of the training images, `lr` of the next step."""
    state = restored.state
    age_minutes = (time.time() - restored.folder.stat().st_mtime) / 60
    position = "nothing is left to train"
    if state.step < plan.total_steps:
        first = order.rank_batch(state.step, rank=0, world_size=1, start=0, stop=1)
        shard, row = int(first.shard[0]), int(first.row[0])
        position = f"the next image is number {row} of {Path(shards.shards[shard].url).name}, learning rate {lr:.3g}"
    return "\n".join(
        (
            *restored.notes,
            f"going on from {restored.folder}, {max(0.0, age_minutes):.0f} minutes old: step {state.step:,} of "
            f"{plan.total_steps:,}, {state.images_seen:,} images seen, epoch "
            f"{state.images_seen / plan.samples_per_epoch:.2f}; {position}; {state.skipped_steps} steps skipped so "
            "far; weights, optimizer and loss scale are restored, random numbers are functions of seed and step",
        )
    )


def describe_changes(
    restored: Restored, *, recipe: Recipe, identity: Mapping[str, Any], written_by: Mapping[str, str]
) -> str | None:
    """What differs between the checkpoint and this process (the last three arguments); None: nothing."""
    before = restored.identity
    layout = [
        f"{name} {before[key]} -> {identity[key]}" for key, name in _LAYOUT.items() if before[key] != identity[key]
    ]
    changes = [*layout, *changed_since(restored.written_by, written_by), *_changed_keys(restored.folder, recipe)]
    if not changes:
        return None
    stage = recipe.train_stage(identity["stage"])
    other_masks = ", dropout draws other masks (dropout_masks: process)" if stage.dropout_masks == "process" else ""
    return f"changed since that checkpoint was written: {', '.join(changes)}" + (
        " (weights and optimizer state are the same; losses may differ from an uninterrupted run's in the last digits"
        f"{other_masks})"
        if layout
        else ""
    )


def _changed_keys(folder: Path, recipe: Recipe) -> list[str]:
    """Recipe keys that differ from the checkpoint's copy; forbidden changes were refused before."""
    try:
        before = flatten(parse_recipe(folder / "recipe.yaml"))
    except (OSError, UserError):  # the digests were right, so another version of this program wrote it
        return []
    now = flatten(recipe)
    return [
        f"{key} {before.get(key, '(absent)')} -> {now[key]}"
        for key in now
        if before.get(key) != now[key] and key not in ("processes", "engine.zero_stage", "name", "experiment")
    ]

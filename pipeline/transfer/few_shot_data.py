"""A stage's few-shot sets, opened and checked. Needs no torch: `shardvit run` does it before it starts anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from data_shards.errors import UserError
from data_shards.opening import open_shards
from data_shards.shard_set import ShardSet
from data_shards.store.location import Commands
from data_shards.store.store import Store
from pipeline.recipe.few_shot import FewShotConfig
from pipeline.recipe.schema import Recipe
from pipeline.recipe.stage import PretrainStage
from pipeline.stage_data import shards_spec, store_of
from pipeline.vocabulary import StageName


@dataclass(frozen=True)
class FewShotData:
    """The shards of one few-shot set."""

    train: ShardSet
    eval: ShardSet


def few_shot_of(recipe: Recipe, *, stage: StageName) -> tuple[FewShotConfig, ...]:
    """What a stage's recipe says; other stages than pretrain have none."""
    config = getattr(recipe.stages, stage)
    return config.few_shot if isinstance(config, PretrainStage) else ()


def open_few_shot(
    recipe: Recipe,
    *,
    stage: StageName,
    report: Callable[[str], None] = print,
    commands: Commands = "refuse",
    store: Store | None = None,
) -> tuple[FewShotData, ...]:
    """Open the sets of a stage, in the recipe's order; `commands` as `stage_data.open_data`.

    Raises:
        CommandRefused: one is a command.
        UserError: shards are missing or broken, their classes differ, or an image has several labels.
    """
    found: list[FewShotData] = []
    for number, each in enumerate(few_shot_of(recipe, stage=stage)):
        store = store or store_of(recipe, commands=commands)
        train, held_out = (
            open_shards(shards_spec(shards), damaged="report", report=report, store=store)
            for shards in (each.train, each.eval)
        )
        key = f"stages.{stage}.few_shot.{number}"
        if train.is_multi_label or held_out.is_multi_label:
            raise UserError(
                f"{key} ({each.name}) has a list of labels for each image: few-shot needs one label an image"
            )
        if train.classes != held_out.classes:
            raise UserError(
                f"{key} ({each.name}): the classes of train ({train.source}) and eval ({held_out.source}) differ: pack "
                "both from the same list of classes"
            )
        found.append(FewShotData(train, held_out))
    return tuple(found)

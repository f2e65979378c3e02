"""Open and check data sets to transfer to, including few-shot sets of a stage. Imports no torch, so that mistakes show
before anything is loaded or started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from data_shards.errors import UserError
from data_shards.reading.opening import open_shards
from data_shards.shards.location import Commands
from data_shards.shards.shard_set import ShardSet
from data_shards.store.store import Store
from pipeline.recipe.data import FewShotConfig, ShardsConfig
from pipeline.recipe.schema import Recipe
from pipeline.recipe.stage import PretrainStage
from pipeline.recipe.vocabulary import StageName
from pipeline.stage.stage_data import shards_spec, store_of
from pipeline.transfer.results import SetGroup

Say = Callable[[str], None]


@dataclass(frozen=True)
class TransferSet:
    """A data set to transfer to: opened shards with one label an image and the same classes, else UserError."""

    name: str
    train: ShardSet
    eval: ShardSet
    store: Store | None = None
    group: SetGroup | None = None

    def __post_init__(self) -> None:
        for each in (self.train, self.eval):
            if each.is_multi_label:
                raise UserError(
                    f"{each.source} has a list of labels for each image: give a set with one label an image"
                )
        if self.train.classes != self.eval.classes:
            raise UserError(
                f"the classes of {self.train.source} ({self.train.num_classes}) and {self.eval.source} "
                f"({self.eval.num_classes}) differ: pack both from the same list of classes"
            )


def open_set(shards: ShardsConfig, *, store: Store, say: Say) -> ShardSet:
    """Open a set that the user names; report and leave out damage. UserError: it is missing or broken."""
    if shards.weight is not None:
        raise UserError(f"{shards.shards}: a weight means nothing to a single set of shards: leave it out")
    opened = open_shards(shards_spec(shards), damaged="report", report=say, store=store)
    for damage in opened.damage:
        say(damage)
    return opened


def few_shot_of(recipe: Recipe, *, stage: StageName) -> tuple[FewShotConfig, ...]:
    """The few-shot sets of a stage; only pretrain has any."""
    config = getattr(recipe.stages, stage)
    return config.few_shot if isinstance(config, PretrainStage) else ()


def open_few_shot(
    recipe: Recipe,
    *,
    stage: StageName,
    report: Say = print,
    commands: Commands = "refuse",
    store: Store | None = None,
) -> tuple[TransferSet, ...]:
    """Open the sets of a stage, in the recipe's order; `commands` as `stage_data.open_data`.

    Raises:
        CommandRefused: one is a command.
        UserError: shards are missing or broken, their classes differ, or an image has several labels.
    """
    found: list[TransferSet] = []
    for number, each in enumerate(few_shot_of(recipe, stage=stage)):
        store = store or store_of(recipe, commands=commands)
        train, held_out = (
            open_shards(shards_spec(shards), damaged="report", report=report, store=store)
            for shards in (each.train, each.eval)
        )
        try:
            found.append(TransferSet(each.name, train, held_out))
        except UserError as error:
            raise UserError(f"stages.{stage}.few_shot.{number} ({each.name}): {error}") from None
    return tuple(found)

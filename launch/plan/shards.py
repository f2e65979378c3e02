"""Open a stage's existing shards before a run; never `pipe:`, which would run a command.

Indexes tars without a manifest, as a run would. Gives up on an unresponsive bucket after half a minute.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardvit.data_shards.reading.opening import is_there, open_shards
from shardvit.data_shards.shards.location import command_reason, expand_braces, is_local, local_path, redacted
from shardvit.data_shards.shards.manifest import manifest_at
from shardvit.data_shards.shards.shard_set import ShardSet, merge_shard_sets
from shardvit.data_shards.store.download import RetryPolicy
from shardvit.data_shards.store.store import Store
from shardvit.data_shards.text import printable
from shardvit.pipeline.recipe.data import ShardsConfig
from shardvit.pipeline.recipe.roles import Role, missing_paths, role_of
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.stage.stage_data import few_shot_of, shards_spec

GIVE_UP_SECONDS = 30.0  # the user is waiting


@dataclass(frozen=True)
class ShardsBefore:
    """A stage's shards, as far as they exist."""

    unopened: tuple[str, ...]  # a sentence for each set that was not opened
    train: ShardSet | None  # training sets, concatenated; None: at least one was not opened
    held_out: ShardSet | None = None  # None: not opened, or not requested
    also_eval: Mapping[str, ShardSet] = field(default_factory=dict)  # those opened
    role: Role | None = None  # published facts, if `train` is None

    @property
    def num_images(self) -> int | None:
        """Training images, counted or published."""
        return self.train.num_samples if self.train else self.role.images if self.role else None

    @property
    def num_classes(self) -> int | None:
        return self.train.num_classes if self.train else self.role.classes if self.role else None


def look(recipe: Recipe, *, stage: StageName, at: Literal["training", "all"] = "all") -> ShardsBefore:
    """Open the existing sets of a training stage, and name the others; `at="training"` skips held-out sets. UserError
    if shards are broken, StoreError if a location cannot be reached."""
    config, store = recipe.train_stage(stage), Store(None, retry=RetryPolicy(give_up_seconds=GIVE_UP_SECONDS))
    missing: list[str] = []

    def opened(shards: ShardsConfig) -> ShardSet | None:
        if text := _unopened(shards, store=store):
            missing.append(text)
            return None
        return _open(shards, store=store)

    missing += [text for each in config.train or () if (text := _unopened(each, store=store))]
    train = None
    if config.train and not missing:
        train = merge_shard_sets([_open(each, store=store) for each in config.train])
    held_out, also_eval = None, dict[str, ShardSet]()
    if at == "all":
        held_out = opened(config.eval) if config.eval else None
        also_eval = {name: one for name, each in config.also_eval.items() if (one := opened(each))}
        for one in (shards for each in few_shot_of(recipe, stage=stage) for shards in (each.train, each.eval)):
            missing += [text] if (text := _unopened(one, store=store)) else []
    if text := missing_paths(recipe, stage=stage):
        missing.append(text)
    return ShardsBefore(tuple(missing), train, held_out, also_eval, role=None if train else role_of(config))


def _unopened(shards: ShardsConfig, *, store: Store) -> str | None:
    """Say why a set is not opened; None if it exists."""
    location = shards.shards
    if why := command_reason(location):
        return f"{redacted(location)} {why}, and none is started"
    if is_local(location):
        paths = map(local_path, expand_braces(location))
        there = any(any(path.iterdir()) if path.is_dir() else path.exists() for path in paths)
    elif location.partition("?")[0].endswith(".tar") or expand_braces(location) != [location]:
        return None
    else:
        there = is_there(manifest_at(location), store=store)
    return None if there else f"{redacted(location)} is not there yet"


def _open(shards: ShardsConfig, *, store: Store) -> ShardSet:
    return open_shards(
        shards_spec(shards),
        damaged="report",
        report=lambda line: print(printable(line), file=sys.stderr),
        store=store,
    )

"""Which of a stage's shards exist before a run; no `pipe:` is opened, because it is a command.

Tars without a manifest are indexed, as a run would. Gives up on a silent bucket after half a minute.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_shards.manifest import MANIFEST_FILE
from data_shards.opening import open_shards
from data_shards.shard_set import ShardSet, merge_shard_sets
from data_shards.store.download import MissingObject, RetryPolicy
from data_shards.store.location import expand_braces, is_local, join, local_path, shown, why_command
from data_shards.store.store import Store
from data_shards.text import printable
from pipeline.recipe.data import ShardsConfig
from pipeline.stage_data import shards_spec

GIVE_UP_SECONDS = 30.0  # the user is waiting
_MOST_MANIFEST_BYTES = 1 << 30


@dataclass(frozen=True)
class ShardsBefore:
    """A stage's shards."""

    unopened: tuple[str, ...]  # a sentence for each set that was not opened
    train: ShardSet | None  # the training sets, concatenated; None: one of them was not opened
    held_out: ShardSet | None = None  # None: it was not opened, or not asked for


def look(training: Sequence[ShardsConfig], *, held_out: ShardsConfig | None = None) -> ShardsBefore:
    """Open those of a stage's training sets that exist, and name those that do not. Raises UserError if shards exist
    and are broken, and StoreError if a place cannot be reached."""
    store = Store(None, retry=RetryPolicy(give_up_seconds=GIVE_UP_SECONDS))
    missing = [text for each in training if (text := _unopened(each, store=store))]
    train = None if missing else merge_shard_sets([_open(each, store=store) for each in training])
    evaluated = None
    if held_out and (text := _unopened(held_out, store=store)):
        missing.append(text)
    elif held_out:
        evaluated = _open(held_out, store=store)
    return ShardsBefore(tuple(missing), train, evaluated)


def _unopened(shards: ShardsConfig, *, store: Store) -> str | None:
    """Why a set is not opened; None: it exists."""
    location = shards.shards
    if why := why_command(location):
        return f"{shown(location)} {why}, and none is started"
    if is_local(location):
        there = any(_has_something(local_path(each)) for each in expand_braces(location))
    elif location.partition("?")[0].endswith(".tar") or expand_braces(location) != [location]:
        return None
    else:
        try:
            there = bool(store.read_small(join(location, MANIFEST_FILE), most_bytes=_MOST_MANIFEST_BYTES))
        except MissingObject:
            there = False
    return None if there else f"{shown(location)} is not there yet"


def _has_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()


def _open(shards: ShardsConfig, *, store: Store) -> ShardSet:
    return open_shards(
        shards_spec(shards),
        damaged="report",
        report=lambda line: print(printable(line), file=sys.stderr),
        store=store,
    )

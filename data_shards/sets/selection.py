"""Choose samples of a set by an expression over its statistics: a manifest beside the set's own counts only them.

Costs a pass over the columns named, and a bit a sample in the manifest. The shards stay as they are; a run, `check` or
`show` takes the manifest's location in place of the folder's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.reading.opening import manifest_of, set_of, splits_below
from shardvit.data_shards.sets.keeping import replace_manifest
from shardvit.data_shards.sets.statistics import STATISTICS_FILE, open_table
from shardvit.data_shards.sets.where import rows_where
from shardvit.data_shards.shards.location import join, redacted
from shardvit.data_shards.shards.manifest import Manifest, Shard, manifest_name, split_manifest
from shardvit.data_shards.shards.row_bitmap import pack_rows, stored_rows, unpack_rows
from shardvit.data_shards.shards.shard_set import Report, ShardSet
from shardvit.data_shards.store.folders import open_folder
from shardvit.data_shards.store.store import Store
from shardvit.data_shards.text import counted


@dataclass(frozen=True)
class Choice:
    """What an expression chose of one split."""

    location: str
    of: Manifest
    chosen: Manifest


def choose(location: str, text: str, *, store: Store) -> list[Choice]:
    """Evaluate an expression over each split of a set; UserError if it is no expression, or keeps nothing of one."""
    places = list(splits_below(location, store=store).values()) or [location]
    return [_choose_of_split(place, text, store=store) for place in places]


def write_choices(choices: Sequence[Choice], *, name: str, report: Report) -> None:
    """Write a `manifest-NAME.json` for each split; one of that name stays by its digest."""
    file = manifest_name(name)
    for choice in choices:
        folder = split_manifest(choice.location)[0]
        manifest = replace(choice.chosen, name=f"{choice.of.name} ({name})")
        is_new = replace_manifest(open_folder(folder), manifest, file=file)
        known = "" if is_new else "was written before: "
        report(f"{redacted(join(folder, file))}: {known}{describe(choice)}")


def open_where(location: str, text: str, *, store: Store) -> ShardSet:
    """Open the samples of one split of which an expression is true; raises as `choose` does."""
    return set_of(_choose_of_split(location, text, store=store).chosen, location)


def describe(choice: Choice) -> str:
    """Say how many images were chosen, and by what."""
    kept, every = choice.chosen.num_samples, choice.of.num_samples
    share = f"all {counted(kept, 'image')}" if kept == every else f"{kept:,} of {counted(every, 'image')}"
    return f"{share} where {choice.chosen.where}"


def _choose_of_split(location: str, text: str, *, store: Store) -> Choice:
    of = manifest_of(location, store=store)
    folder = split_manifest(location)[0]
    name = redacted(join(folder, STATISTICS_FILE))
    if (table := open_table(open_folder(folder))) is None:
        raise UserError(
            f"{name}: it is not there, so nothing can be chosen; shardvit check --decode --statistics writes it"
        )
    said = rows_where(text, table, name=name)
    chosen: list[Shard] = []
    for shard in of.shards:
        if (rows := said.get(shard.file)) is None or len(rows) != _stored(shard):
            raise UserError(
                f"{name}: it lacks samples of {shard.file}; shardvit check --decode --statistics writes it again"
            )
        rows = rows & unpack_rows(shard.rows) if shard.rows else rows
        if count := int(rows.sum()):
            chosen.append(replace(shard, num_samples=count, rows="" if rows.all() else pack_rows(rows)))
    if not chosen:
        raise UserError(f"{redacted(location)}: no image is left where {text}: correct it, or give a split alone")
    return Choice(location, of, replace(of, shards=tuple(chosen), where=text, parent=of.digest))


def _stored(shard: Shard) -> int:
    return stored_rows(shard.rows) if shard.rows else shard.num_samples

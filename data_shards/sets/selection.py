"""Choose samples of a set by an expression over its statistics: a manifest beside the set's own counts only them.

Costs a pass over the columns named, and a bit a sample in the manifest. The shards stay as they are; a run, `check` or
`show` takes the manifest's location in place of the folder's.
"""

from __future__ import annotations

from dataclasses import replace

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


def write_choice(location: str, text: str, *, name: str, report: Report) -> None:
    """Write a `manifest-NAME.json` beside each split's manifest; one of that name stays by its digest.

    UserError, with nothing written, if `text` is no expression, or keeps nothing of a split.
    """
    store, file = Store(), manifest_name(name)
    places = splits_below(location, store=store).values() or [location]
    choices = [(place, *_choose(place, text, store=store)) for place in places]
    for place, of, chosen in choices:
        folder = split_manifest(place)[0]
        is_new = replace_manifest(open_folder(folder), replace(chosen, name=f"{of.name} ({name})"), file=file)
        known = "" if is_new else "was written before: "
        count = f"{chosen.num_samples:,}" if chosen.num_samples < of.num_samples else "all"
        report(f"{redacted(join(folder, file))}: {known}{count} of {counted(of.num_samples, 'image')} where {text}")


def open_where(location: str, text: str) -> ShardSet:
    """Open the samples of one split of which an expression is true; raises as `write_choice` does."""
    return set_of(_choose(location, text, store=Store())[1], location)


def _choose(location: str, text: str, *, store: Store) -> tuple[Manifest, Manifest]:
    """Return a split's manifest and that of the samples chosen."""
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
        stored = stored_rows(shard.rows) if shard.rows else shard.num_samples
        if (rows := said.get(shard.file)) is None or len(rows) != stored:
            raise UserError(
                f"{name}: it lacks samples of {shard.file}; shardvit check --decode --statistics writes it again"
            )
        rows = rows & unpack_rows(shard.rows) if shard.rows else rows
        if count := int(rows.sum()):
            chosen.append(replace(shard, num_samples=count, rows="" if rows.all() else pack_rows(rows)))
    if not chosen:
        raise UserError(f"{redacted(location)}: no image is left where {text}: correct it, or give a split alone")
    return of, replace(of, shards=tuple(chosen), where=text, parent=of.digest)

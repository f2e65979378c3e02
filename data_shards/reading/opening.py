"""Open shards at any location as a `ShardSet`: a packed folder, local or remote, or other tools' tars.

A packed set costs its manifest and, locally, one `stat` a shard; other tars are indexed once (`indexing`). No torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.location import PIPE, expand_braces, is_local, join, local_path, redacted
from shardvit.data_shards.shards.manifest import (
    MANIFEST_FILE,
    Manifest,
    ShardFiles,
    load_manifest,
    manifest_at,
    manifest_name,
    parse_manifest,
    shard_files,
    split_manifest,
)
from shardvit.data_shards.shards.shard_set import (
    Damaged,
    Report,
    ShardEntry,
    ShardSet,
    ShardSource,
    ShardsSpec,
    ShardTable,
)
from shardvit.data_shards.shards.tar_index import index_path, read_index, readable_index
from shardvit.data_shards.vocabulary import SPLIT_FOLDERS

if TYPE_CHECKING:
    from shardvit.data_shards.store.store import Store

_MOST_MANIFEST_BYTES = 1 << 30  # 150 bytes a shard, and the classes


def open_shards(
    spec: ShardsSpec | str,
    *,
    damaged: Damaged = "refuse",
    index_folder: Path | None = None,
    report: Report = print,
    store: Store | None = None,
) -> ShardSet:
    """Open a set of shards; `spec` may be just a location, `store` is for locations that are not local.

    Damage is refused, or reported in the set's `damage`. Indexes of tars without a manifest are kept in `index_folder`,
    by default in the user's cache; `report` receives progress lines. UserError if nothing is there, or for a broken
    manifest, damage or ambiguous labels; StoreError if the location cannot be reached.
    """
    if isinstance(spec, str):
        spec = ShardsSpec(spec)
    if spec.portion is not None:
        whole = replace(spec, portion=None)
        opened = open_shards(whole, damaged=damaged, index_folder=index_folder, report=report, store=store)
        from shardvit.data_shards.shards.holdout import take_portion

        return take_portion(opened, spec.portion)
    location = spec.location
    if store is None and not is_local(location):
        from shardvit.data_shards.store.store import Store

        store = Store()
    if is_packed(location):
        for name, given in (("label", spec.label), ("classes", spec.classes), ("kind", spec.kind != "single" or None)):
            if given is not None:
                raise UserError(f"{redacted(location)} has a {MANIFEST_FILE}, which says it: leave out {name}")
        return _open_packed(spec, damaged=damaged, report=report, store=store)
    from shardvit.data_shards.reading.external_shards import open_external

    return open_external(
        spec, urls=tar_urls(location), damaged=damaged, index_folder=index_folder, report=report, store=store
    )


def open_all_splits(locations: Sequence[str], *, store: Store, report: Report = print) -> list[ShardSet]:
    """Open each set of shards, and all splits of a folder that has some; raises as `open_shards` does."""
    places = [place for each in locations for place in splits_below(each, store=store).values() or (each,)]
    return [open_shards(place, store=store, report=report) for place in places]


def splits_below(location: str, *, store: Store) -> dict[str, str]:
    """Return {name: location} of the splits in a folder that is not a set of shards itself."""
    if is_local(location):
        folder = local_path(location)
        if not folder.is_dir() or (folder / MANIFEST_FILE).is_file() or any(folder.glob("*.tar")):
            return {}
        names = [*SPLIT_FOLDERS, *sorted(path.name for path in folder.iterdir() if path.name not in SPLIT_FOLDERS)]
        with_tars = [name for name in SPLIT_FOLDERS if any((folder / name).glob("*.tar"))]
        return {
            name: str(folder / name) for name in names if name in with_tars or (folder / name / MANIFEST_FILE).is_file()
        }
    if not is_packed(location) or split_manifest(location)[0] != location:
        return {}
    if is_there(join(location, MANIFEST_FILE), store=store):
        return {}
    places = {name: join(location, name) for name in SPLIT_FOLDERS}
    return {name: place for name, place in places.items() if is_there(join(place, MANIFEST_FILE), store=store)}


def is_there(url: str, *, store: Store | None) -> bool:
    """True if there is such a file; StoreError if the store cannot be reached."""
    if store is None or is_local(url):
        return local_path(url).is_file()
    from shardvit.data_shards.store.download import MissingObject

    try:
        store.size(url)
    except MissingObject:
        return False
    return True


def is_packed(location: str) -> bool:
    """True if a manifest is required: not for a local folder of tars, a pattern or a tar."""
    if location.startswith(PIPE):
        return False
    if is_local(location) and (path := local_path(location)).is_dir():
        return (path / MANIFEST_FILE).is_file() or not any(path.glob("*.tar"))
    return not location.partition("?")[0].endswith(".tar") and expand_braces(location) == [location]


def tar_urls(location: str) -> list[str]:
    """List the tars of a location without a manifest."""
    if is_local(location) and local_path(location).is_dir():
        return [str(path.absolute()) for path in sorted(local_path(location).glob("*.tar"))]
    return [str(local_path(url).absolute()) if is_local(url) else url for url in expand_braces(location)]


def _open_packed(spec: ShardsSpec, *, damaged: Damaged, report: Report, store: Store | None) -> ShardSet:
    location = spec.location
    manifest = manifest_of(location, store=store)
    if spec.digest not in ("", manifest.digest):
        kept = join(split_manifest(location)[0], manifest_name(spec.digest))
        if is_there(kept, store=store) and (before := manifest_of(kept, store=store)).digest == spec.digest:
            report(f"{redacted(location)} has changed since: going on with {redacted(kept)}, as it was")
            location, manifest = kept, before
        else:
            report(f"{redacted(location)} has changed since, and {redacted(kept)}, as it was, is not there")
    return set_of(manifest, location, damaged=damaged)


def set_of(manifest: Manifest, location: str, *, damaged: Damaged = "refuse") -> ShardSet:
    """Return the set that a manifest describes, which is read from `location` or might be written there."""
    return _open_local(manifest, location, damaged=damaged) if is_local(location) else _packed(manifest, location)


def manifest_of(location: str, *, store: Store | None) -> Manifest:
    """Read a set's manifest, given its folder or itself; `store` is for a URL. Raises as `open_shards` does."""
    if store is None or is_local(location):
        return load_manifest(local_path(location))  # not absolute: messages show paths as the user typed them
    from shardvit.data_shards.store.download import MissingObject

    url = manifest_at(location)
    try:
        content = store.read_small(url, most_bytes=_MOST_MANIFEST_BYTES)
    except MissingObject as error:
        pattern = redacted(join(location, "x-")) + "{000..127}.tar"
        raise UserError(f"{error}; tars without a manifest are given as a pattern, such as {pattern}") from None
    return parse_manifest(content, root=Path(), name=redacted(url))


def _open_local(manifest: Manifest, location: str, *, damaged: Damaged) -> ShardSet:
    files = shard_files(manifest)
    found = list(files.damage.values())
    if found and damaged == "refuse":
        more = f" (and {len(found) - 1} more shards are damaged)" if len(found) > 1 else ""
        raise UserError(found[0] + more)
    opened = _packed(manifest, location, files=files)
    lost_samples = sum(_lost_samples(opened.shards[number]) for number in files.damage)
    return replace(opened, damage=tuple(found), lost_samples=lost_samples)


def _lost_samples(entry: ShardEntry) -> int:
    """Count samples missing from a damaged local shard, by the index beside it, or else by the tar's headers."""
    from shardvit.data_shards.shards.holdout import index_of

    try:
        num_bytes = os.stat(entry.url).st_size
    except OSError:
        return entry.num_samples
    try:
        index = index_of(entry.subset, read_index(index_path(entry.url), label=entry.labels.part))
    except (OSError, UserError):
        index = index_of(entry.subset, readable_index(entry.url, label=entry.labels.part).index)
        return max(0, entry.num_samples - len(index))
    ends = (index.image_offset + index.image_size, index.label_offset + index.label_size)
    return int(((ends[0] > num_bytes) | (ends[1] > num_bytes)).sum())


def _packed(manifest: Manifest, location: str, *, files: ShardFiles | None = None) -> ShardSet:
    folder, file = split_manifest(location)
    root = str(manifest.root) if files else ""
    rows = tuple(shard.rows for shard in manifest.shards)
    source_of = ShardSource(
        str(manifest.root.absolute()) if files else folder,
        root,
        manifest.labels,
        len(manifest.shards),
        rows=rows if any(rows) else (),
        manifest=file,
        digest=manifest.digest,
    )
    found = {"stamps": files.stamps, "damaged": tuple(files.damage)} if files else {}
    table = ShardTable.of(source_of, manifest.shards, **found)
    source = redacted(location) if not root else root if file == MANIFEST_FILE else os.path.join(root, file)
    its = (manifest.name, source, manifest.split, manifest.classes, table, manifest.digest)
    return ShardSet(*its, channels=manifest.channels, dtype=manifest.dtype)

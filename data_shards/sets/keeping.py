"""Write a set's manifest so that who reads it has the old one or the new one, and who began with the old one has it.

The old one stays beside the new one, as `manifest-DIGEST.json`, written before. Nothing of the shards is touched.
"""

from __future__ import annotations

from pathlib import Path

from shardvit.data_shards.shards.location import join, redacted
from shardvit.data_shards.shards.manifest import (
    MANIFEST_FILE,
    Manifest,
    as_json,
    json_text,
    manifest_name,
    parse_manifest,
)
from shardvit.data_shards.store.folders import Folder


def write_manifest(folder: Folder, manifest: Manifest, *, file: str = MANIFEST_FILE) -> None:
    """Write a manifest, after the `sizes.json` that goes with a `manifest.json`."""
    if file == MANIFEST_FILE:
        folder.write("sizes.json", json_text({shard.file: shard.num_samples for shard in manifest.shards}).encode())
    folder.write(file, json_text(as_json(manifest)).encode())


def replace_manifest(folder: Folder, manifest: Manifest, *, file: str = MANIFEST_FILE) -> bool:
    """Write a manifest, after keeping the one it replaces by its digest; False if it is there already."""
    try:
        before = folder.read(file)
    except FileNotFoundError:
        pass
    else:
        digest = parse_manifest(before, root=Path(), name=redacted(join(folder.location, file))).digest
        if digest == manifest.digest:
            return False
        folder.write(manifest_name(digest), before)
    write_manifest(folder, manifest, file=file)
    return True

"""Write a manifest where its shards are."""

from pathlib import Path

from shardvit.data_shards.sets import keeping
from shardvit.data_shards.shards.manifest import MANIFEST_FILE, Manifest
from shardvit.data_shards.store.folders import LocalFolder


def write_manifest(manifest: Manifest, *, file: str = MANIFEST_FILE) -> Path:
    keeping.write_manifest(LocalFolder(manifest.root), manifest, file=file)
    return manifest.root / file

"""A folder with images, here or in a store: what lies in it, by the same rules.

A local one is listed folder by folder when asked; one in a store by a single listing of all names (a request for each
1,000), which is kept: about 300 bytes a file.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.base import (
    is_image,
    scan_folder,
    walk,
    walk_folder,
)
from shardvit.data_shards.packing.sources.located import ABSENT, Container, LocatedFiles, folder_files, stamp_of
from shardvit.data_shards.shards.location import join, redacted
from shardvit.data_shards.shards.shard_index import Texts
from shardvit.data_shards.store.ranges import list_url

Scanned = tuple[list[str], list[str], list[str]]  # subfolders, images, other files


class FolderTree(Protocol):
    """Names are relative to the tree's root, with forward slashes; "" is the root."""

    @property
    def root(self) -> Path | None: ...  # None: in a store
    @property
    def spec(self) -> str: ...  # reopens it
    def place(self, name: str) -> str: ...  # absolute path, or URL
    def at(self, name: str) -> str: ...  # to be shown
    def scan(self, folder: str) -> Scanned: ...  # sorted, without hidden ones
    def walk(self, folder: str) -> tuple[list[str], list[str]]: ...  # images and other files below, depth first
    def files(self, names: Sequence[str]) -> LocatedFiles: ...


@dataclass(frozen=True)
class LocalTree:
    """A folder of this machine."""

    root: Path

    @property
    def spec(self) -> str:
        return str(self.root.resolve())

    def place(self, name: str) -> str:
        return str((self.root / name).absolute())

    def at(self, name: str) -> str:
        return str(self.root / name)

    def scan(self, folder: str) -> Scanned:
        return scan_folder(self.root / folder)

    def walk(self, folder: str) -> tuple[list[str], list[str]]:
        return walk_folder(self.root, folder)

    def files(self, names: Sequence[str]) -> LocatedFiles:
        return folder_files(self.root, names)


@dataclass(frozen=True)
class StoreTree:
    """A folder of a store, as `list_tree` found it."""

    root = None

    location: str
    rows: dict[str, int]  # of all visible files
    sizes: Sequence[int]
    stamps: Sequence[int]
    scans: Mapping[str, Scanned]

    @property
    def spec(self) -> str:
        return redacted(self.location)

    def place(self, name: str) -> str:
        return join(self.location, name) if name else self.location

    def at(self, name: str) -> str:
        return redacted(self.place(name))

    def scan(self, folder: str) -> Scanned:
        return self.scans.get(folder, ([], [], []))

    def walk(self, folder: str) -> tuple[list[str], list[str]]:
        return walk(self.scan, folder)

    def files(self, names: Sequence[str]) -> LocatedFiles:
        """Locate files; `ABSENT` is the size of those that are not there."""
        rows = np.array([self.rows.get(name, len(self.sizes)) for name in names], np.int64)
        sizes, stamps = np.array([*self.sizes, ABSENT], np.int64)[rows], np.array([*self.stamps, 0], np.uint64)[rows]
        nothing = np.zeros(len(rows), np.int32)
        place = Container("folder", self.location)
        return LocatedFiles(self.spec, (place,), Texts.of(names), nothing, nothing.astype(np.int64), sizes, stamps)


def list_tree(location: str) -> StoreTree:
    """List a folder of a store; UserError if there is nothing in it, or it cannot be listed."""
    rows: dict[str, int] = {}
    sizes, stamps = array("q"), array("Q")
    scans: defaultdict[str, Scanned] = defaultdict(lambda: ([], [], []))
    folders = {""}
    for name, num_bytes, stamp in list_url(location):
        if any(part.startswith(".") or not part for part in name.split("/")):  # hidden, or no name of a file
            continue
        rows[name] = len(sizes)
        sizes.append(ABSENT if num_bytes is None else num_bytes)
        stamps.append(stamp_of(name, num_bytes, stamp))
        folder, _, last = name.rpartition("/")
        scans[folder][1 if is_image(name) else 2].append(last)
        while folder not in folders:
            folders.add(folder)
            folder, _, last = folder.rpartition("/")
            scans[folder][0].append(last)
    if not rows:
        raise UserError(f"{redacted(location)}: there is nothing in it; correct the URL, or give tars by a pattern")
    for scan in scans.values():
        for names in scan:
            names.sort()
    return StoreTree(location, rows, sizes, stamps, dict(scans))

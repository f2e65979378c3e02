"""A folder with images, here or in a store: what lies in it, by the same rules.

A local one is listed folder by folder when asked; one in a store by a single listing of all names (a request for each
1,000), which is kept: about 300 bytes a file.
"""

from __future__ import annotations

import os
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.base import images_of, scan_folder, walk
from shardvit.data_shards.packing.sources.located import ABSENT, Container, LocatedFiles, folder_files, stamp_of
from shardvit.data_shards.shards.location import is_local, join, local_path, redacted
from shardvit.data_shards.store.ranges import list_url

Scanned = tuple[list[str], list[str], list[str]]  # subfolders, images, other files


@dataclass(frozen=True)
class FolderTree:
    """A folder; names are relative to it, with forward slashes, and "" is itself."""

    location: str  # a path as the user typed it, or a URL
    scan: Callable[[str], Scanned]  # lists one folder, sorted, without hidden ones
    files: Callable[[Sequence[str]], LocatedFiles]  # `ABSENT` is the size of those that are not there

    @property
    def root(self) -> Path | None:
        """None: in a store."""
        return local_path(self.location) if is_local(self.location) else None

    @property
    def spec(self) -> str:
        """Reopens it."""
        return str(self.root.resolve()) if self.root else redacted(self.location)

    def place(self, name: str) -> str:
        return join(self.location, name) if name else self.location

    def at(self, name: str) -> str:
        """Name a place in messages."""
        return redacted(self.place(name))

    def walk(self, folder: str) -> tuple[list[str], list[str]]:
        """List images and other files below a folder, depth first."""
        images, others = zip(*self.folders(folder), strict=True)
        return [*chain.from_iterable(images)], [*chain.from_iterable(others)]

    def folders(self, folder: str = "") -> Iterator[tuple[list[str], list[str]]]:
        """Yield the images and other files of each folder below one, depth first."""
        return walk(self.scan, folder, place=lambda each: os.path.realpath(self.place(each)) if self.root else each)


def local_tree(root: Path) -> FolderTree:
    """Open a folder of this machine."""
    return FolderTree(str(root), lambda folder: scan_folder(root / folder), partial(folder_files, root))


def list_tree(location: str) -> FolderTree:
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
        scans[folder][2].append(last)
        while folder not in folders:
            folders.add(folder)
            folder, _, last = folder.rpartition("/")
            scans[folder][0].append(last)
    if not rows:
        raise UserError(f"{redacted(location)}: there is nothing in it; correct the URL, or give tars by a pattern")
    for folders_in, images, others in scans.values():
        folders_in.sort()
        images[:], others[:] = images_of(sorted(others))
    sizes.append(ABSENT)
    stamps.append(0)

    def files(names: Sequence[str]) -> LocatedFiles:
        found = np.array([rows.get(name, -1) for name in names], np.int64)
        here = np.array(sizes, np.int64)[found], np.array(stamps, np.uint64)[found]
        return LocatedFiles.of(redacted(location), Container("folder", location), names, sizes=here[0], stamps=here[1])

    return FolderTree(location, lambda folder: scans.get(folder, ([], [], [])), files)

"""List the files in a folder or in archives, for the readers of published data sets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from data_shards.errors import UserError
from data_shards.packing.sources.archive import Archive, Listing, Unpacking, list_archives
from data_shards.packing.sources.base import SUFFIXES, FileImages, ImageSet
from data_shards.packing.sources.folder import walk_files
from data_shards.shards.shard_index import Texts

_MOST_SMALL_BYTES = 1 << 28  # of a file that is read whole: CIFAR-100's training part has 155 MB


class Tree(Protocol):
    """The files below `path`: relative names with forward slashes; a row is a file's number.

    `images` are read where they lie; `read` returns a small file whole, or raises UserError.
    """

    @property
    def path(self) -> Path: ...
    @property
    def names(self) -> Sequence[str]: ...
    def images(self, rows: NDArray[np.int64], labels: NDArray[np.int64]) -> ImageSet: ...
    def read(self, row: int) -> bytes: ...


@dataclass(frozen=True)
class FolderTree:
    """A folder's files, named with the folder's own name in front, as an archive of it would."""

    path: Path
    names: list[str]

    def images(self, rows: NDArray[np.int64], labels: NDArray[np.int64]) -> ImageSet:
        return FileImages(root=self._above, files=[self.names[row] for row in rows.tolist()], labels=labels)

    def read(self, row: int) -> bytes:
        path = self._above / self.names[row]
        try:
            if not path.is_file() or path.stat().st_size > _MOST_SMALL_BYTES:
                raise UserError(f"{path}: not a plain file of the size that is published; fetch it again")
            return path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: the file cannot be read ({error.strerror})") from None

    @property
    def _above(self) -> Path:
        return Path(os.path.abspath(self.path)).parent


@dataclass(frozen=True)
class ArchiveTree:
    """Files of one archive, or of several in a folder."""

    path: Path
    listing: Listing

    @property
    def names(self) -> Texts:
        return self.listing.names

    def images(self, rows: NDArray[np.int64], labels: NDArray[np.int64]) -> ImageSet:
        return ArchiveImages(listing=self.listing, rows=rows, labels=labels)

    def read(self, row: int) -> bytes:
        try:
            if self.listing.size[row] > _MOST_SMALL_BYTES:
                raise OSError("larger than what is published")
            return self.listing.read(row)
        except OSError as error:
            raise UserError(
                f"{self.path}: {self.names[row]!a} in it cannot be read ({error}); fetch it again"
            ) from None


@dataclass(frozen=True)
class ArchiveImages:
    """Images inside archives: the files `rows` of a listing."""

    listing: Listing
    rows: NDArray[np.int64]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> bytes:
        return self.listing.read(int(self.rows[index]))

    def trace(self, index: int) -> str:
        return self.listing.names[int(self.rows[index])]

    @property
    def num_bytes(self) -> NDArray[np.int64]:
        return self.listing.size[self.rows]

    def stamp(self, index: int) -> bytes:
        row = int(self.rows[index])
        archive = self.listing.archives[int(self.listing.archive[row])]
        place = (int(self.listing.offset[row]), int(self.listing.size[row]), archive.num_bytes, archive.modified_ns)
        return f"{self.trace(index)}\0{place}".encode(errors="surrogateescape")


def open_tree(path: Path, *, unpacking: Unpacking) -> Tree:
    """List a folder or an archive. Raises UserError if it is neither, or cannot be read."""
    if path.is_dir():
        return FolderTree(path, walk_files(Path(os.path.abspath(path)).parent, start=Path(os.path.abspath(path)).name))
    if not is_archive(path):
        raise UserError(f"{path}: there is no such folder, and no archive ({', '.join(SUFFIXES)}) of that name")
    return ArchiveTree(path, list_archives([Archive(path, unpacking)]))


def is_archive(path: Path) -> bool:
    """True for an existing file that is named as an archive."""
    return path.name.lower().endswith(SUFFIXES) and path.is_file()


def rows_by_name(tree: Tree, wanted: Iterable[str] | None = None) -> dict[str, int]:
    """File name without folders -> row, of the wanted ones or all; hidden files are passed over."""
    names = None if wanted is None else set(wanted)
    found: dict[str, int] = {}
    for row, path in enumerate(tree.names):
        name = path.rpartition("/")[2]
        if not name.startswith(".") and (names is None or name in names):
            found[name] = row
    return found

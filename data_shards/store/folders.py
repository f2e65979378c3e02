"""A folder to read and write by name, here or in a store: a file is there whole, or not at all.

A local file is written beside its place, flushed and renamed. An object of a store is uploaded in parts and becomes
visible with the last one; a failed upload is aborted. Nothing is ever decided by a listing, which may be late.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Folder(Protocol):
    """`location` is a local path or a URL; names are relative, with "/". OSError or StoreError if it fails."""

    @property
    def location(self) -> str: ...
    def at(self, name: str) -> Folder: ...
    def read(self, name: str) -> bytes:  # FileNotFoundError if it is not there
        ...

    def write(self, name: str, data: bytes) -> None: ...
    def put(self, name: str, file: Path) -> None:  # move or upload a complete local file
        ...

    def size(self, name: str) -> int | None:  # None: not there
        ...

    def remove(self, name: str) -> None:  # missing is fine
        ...


@dataclass(frozen=True)
class LocalFolder:
    """A folder of this machine, or of a file system that all machines see."""

    path: Path

    @property
    def location(self) -> str:
        return str(self.path)


def open_folder(location: str | Path) -> Folder:
    """Open a local path or a URL; creates nothing."""
    raise NotImplementedError

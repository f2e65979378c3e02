"""A folder to read and write by name, here or in a store: a file is there whole, or not at all.

A local file is written beside its place, flushed and renamed. An object of a store is uploaded in parts and becomes
visible with the last one; a failed upload is aborted. Nothing is ever decided by a listing, which may be late. Names
are relative, with "/"; folders are picklable, and cheap to make.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardvit.data_shards.durable import replaced
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.location import is_local, join, local_path, protocol, redacted
from shardvit.data_shards.store import ranges
from shardvit.data_shards.store.upload import WRITABLE, abort_unfinished, claim, remove, upload


@dataclass(frozen=True)
class LocalFolder:
    """A folder of this machine, or of a file system that all machines see; made by the first file. OSError."""

    path: Path

    @property
    def location(self) -> str:
        return str(self.path)

    def at(self, name: str) -> LocalFolder:
        return LocalFolder(self._place(name))

    def read(self, name: str) -> bytes:
        """FileNotFoundError if it is not there."""
        return self._place(name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        place = self._place(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        with replaced(place, writers="several") as beside:
            beside.write_bytes(data)

    def put(self, name: str, file: Path) -> None:
        """Move or upload a complete local file, which is gone afterwards."""
        place = self._place(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        with replaced(place, writers="several") as beside:
            shutil.move(file, beside)

    def size(self, name: str) -> int | None:
        """None: it is not there."""
        try:
            return self._place(name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def remove(self, name: str) -> None:
        """Missing is fine."""
        with suppress(FileNotFoundError, NotADirectoryError):
            self._place(name).unlink()

    def tidy(self) -> None:
        """Abort what killed processes were uploading to it; only when no other writes."""

    def _place(self, name: str) -> Path:
        return self.path / _demand_inside(name, self.location)


@dataclass(frozen=True)
class StoreFolder:
    """A prefix of a bucket, or a folder of another store of fsspec. StoreError beside the errors of `LocalFolder`."""

    location: str

    def at(self, name: str) -> StoreFolder:
        return StoreFolder(self._url(name))

    def read(self, name: str) -> bytes:
        return ranges.read_whole(self._url(name))

    def write(self, name: str, data: bytes) -> None:
        upload(self._url(name), data)

    def put(self, name: str, file: Path) -> None:
        upload(self._url(name), file)
        file.unlink()

    def claim(self, name: str, data: bytes) -> bytes:
        """Write a file unless it is there; return what is there then."""
        while True:
            claim(self._url(name), data)
            with suppress(FileNotFoundError):  # removed since
                return self.read(name)

    def size(self, name: str) -> int | None:
        try:
            return ranges.stat_url(self._url(name))[0]
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        remove(self._url(name))

    def tidy(self) -> None:
        abort_unfinished(self.location)

    def _url(self, name: str) -> str:
        return join(self.location, _demand_inside(name, redacted(self.location)))


Folder = LocalFolder | StoreFolder


def open_folder(location: str | Path) -> Folder:
    """Open a local path or a URL; creates nothing. UserError for a URL that cannot be written to."""
    text = str(location)
    if is_local(text):
        return LocalFolder(local_path(text))
    if (kind := protocol(text)) not in WRITABLE:
        raise UserError(
            f"{redacted(text)}: {kind}: cannot be written to: name a local folder, a bucket such as s3://bucket/set, "
            f"or another URL of {', '.join(sorted(WRITABLE - {'memory'}))}"
        )
    return StoreFolder(text)


def _demand_inside(name: str, folder: str) -> str:
    if any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name or "\0" in name:
        raise UserError(f"{name!r} is no name of a file inside {folder}")
    return name

"""The hidden folder `.OUT.packing` beside OUT: the finished part of a packing, so that it can resume.

    .OUT.packing/result/...                  becomes OUT, by one rename, when complete
    .OUT.packing/records/SHARD.tar.json      what is known of a finished shard; written last, after tar and index

A shard is finished if it has a record made from the same images, labels and options (its mark), and tar and index have
the recorded sizes. Everything else is deleted and made again. A lock, released when its process ends, keeps a second
packing out. Costs a small file and a few fsync per shard.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_shards.errors import UserError
from data_shards.shards.manifest import Shard, write_json
from data_shards.shards.tar_index import index_path
from data_shards.text import parse_json

DIGEST_BYTES = 16  # of an image


@dataclass(frozen=True)
class RefusedImage:
    """An image that is not in its tar. `was_read`: its bytes were, so a retry will not help."""

    position: int
    reason: str
    was_read: bool


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard; `image_digests` has `DIGEST_BYTES` per planned image, zeros where it was not read."""

    mark: str  # changes with whatever the shard is made from
    shard: Shard  # the tar as the manifest has it
    index_bytes: int  # size of its index
    image_digests: bytes
    refused: tuple[RefusedImage, ...]  # planned images that are not in the tar

    @property
    def is_final(self) -> bool:
        """Whether making it again from the same files would give the same."""
        return all(refused.was_read for refused in self.refused)


@dataclass(frozen=True)
class WorkFolder:
    """`.OUT.packing`, locked while `open_work` holds it."""

    path: Path

    @property
    def result(self) -> Path:
        return self.path / "result"

    @property
    def _records(self) -> Path:
        return self.path / "records"

    @property
    def has_records(self) -> bool:
        return self._records.is_dir() and any(self._records.iterdir())

    def save(self, record: ShardRecord) -> None:
        """Mark a shard as finished; its tar and index are on the disk."""
        refused = [[entry.position, entry.reason, entry.was_read] for entry in record.refused]
        content = {**vars(record), "shard": vars(record.shard), "image_digests": record.image_digests.hex()}
        write_json(self._records / f"{record.shard.file}.json", {**content, "refused": refused})

    def recover(self, marks: Mapping[str, tuple[str, str]]) -> tuple[dict[str, ShardRecord], int]:
        """Keep the finished shards that match `marks`, {file: (split, mark)}, and delete the rest.

        Returns the finished shards by file, and the number of those that do not match.
        """
        found: dict[str, ShardRecord] = {}
        num_records = 0
        for path in self._records.glob("*.json"):
            num_records += 1
            record = _read_record(path)
            if record is None or not record.is_final:
                continue
            split, mark = marks.get(record.shard.file, ("", ""))
            tar = self.result / split / record.shard.file
            sizes = (record.shard.num_bytes, record.index_bytes)
            if mark == record.mark and (_size(tar), _size(index_path(tar))) == sizes:
                found[record.shard.file] = record
        kept = {self._records / f"{file}.json" for file in found}
        for file in found:
            tar = self.result / marks[file][0] / file
            kept |= {tar, index_path(tar)}
        for path in sorted(self.path.rglob("*"), reverse=True):  # what is in a folder before the folder
            if not path.is_dir() or path.is_symlink():
                if path not in kept:
                    path.unlink()
            elif not any(path.iterdir()):
                path.rmdir()
        for folder in (self._records, *(self.result / split for split, _ in marks.values())):
            folder.mkdir(parents=True, exist_ok=True)
        return found, num_records - len(found)


@contextmanager
def open_work(out: Path) -> Iterator[WorkFolder]:
    """Make or take over `.OUT.packing`; UserError if that fails. It is kept only with a finished shard in it."""
    path = work_path(out)
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(f"{path}: the folder cannot be made ({error.strerror}); choose another OUT") from None
    work = WorkFolder(path)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = path.exists() and os.path.samestat(os.fstat(handle), os.stat(path))
        except OSError:
            ours = False
        if not ours:
            raise UserError(f"{out}: another process is packing into it; wait for it or choose another folder")
        try:
            yield work
        finally:
            if not work.has_records or not work.result.is_dir():
                shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(handle)


def work_path(out: Path) -> Path:
    """`a/OUT` -> `a/.OUT.packing`."""
    resolved = out.resolve()
    return resolved.parent / f".{resolved.name}.packing"


def unpacked_path(out: Path) -> Path:
    """`a/OUT` -> `a/.OUT.unpacked`, where gzipped archives are decompressed until OUT is complete."""
    resolved = out.resolve()
    return resolved.parent / f".{resolved.name}.unpacked"


def _read_record(path: Path) -> ShardRecord | None:
    """None for a record that is not readable: its shard is made again."""
    try:
        content: dict[str, Any] = parse_json(path.read_bytes())
        return ShardRecord(
            mark=content["mark"],
            shard=Shard(**content["shard"]),
            index_bytes=content["index_bytes"],
            image_digests=bytes.fromhex(content["image_digests"]),
            refused=tuple(RefusedImage(*entry) for entry in content["refused"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None

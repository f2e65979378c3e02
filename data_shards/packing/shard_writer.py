"""Verify images and write planned shards in parallel: tar, index, record. Resumes after an interruption.

    .OUT.packing/result/...                renamed to OUT when complete
    .OUT.packing/records/SHARD.tar.json    record of a finished shard, written after its tar and index

A shard is finished if its record has the same mark (images, labels, options), and its tar and index have the recorded
sizes. Anything else is deleted and rewritten. A lock keeps a second packing out. One thread writes a shard, so few
large shards use few cores. Threads suffice: decoding, hashing and I/O release the GIL, and the rest is 80 µs an image.
Memory: one image per thread, encoded and decoded (at most 0.5 GB).
"""

import fcntl
import hashlib
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from shardvit.data_shards.durable import flush
from shardvit.data_shards.errors import UnreadableImage, UserError
from shardvit.data_shards.packing.image import prepare_image
from shardvit.data_shards.packing.request import PackRequest
from shardvit.data_shards.packing.shard_plan import LABEL_SPECS, ShardPlan
from shardvit.data_shards.packing.sources.base import ImageSet
from shardvit.data_shards.processes import run_threads
from shardvit.data_shards.progress_line import Progress
from shardvit.data_shards.shards.manifest import Shard, write_json
from shardvit.data_shards.shards.tar_index import build_index, index_path, write_index
from shardvit.data_shards.shards.webdataset_parts import tar_writer
from shardvit.data_shards.text import parse_json

DIGEST_BYTES = 16  # per image
_BUFFER_BYTES = 1 << 20


class RefusedImage(NamedTuple):
    """An image missing from its tar. `was_read`: its bytes could be read, so a retry will not help."""

    position: int
    reason: str
    was_read: bool


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard; `image_digests` has `DIGEST_BYTES` per planned image, zeros if unread."""

    mark: str  # see `plan_mark`
    shard: Shard  # the tar's entry in the manifest
    index_bytes: int
    image_digests: bytes
    refused: tuple[RefusedImage, ...]  # planned images missing from the tar


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
        content = {**vars(record), "shard": vars(record.shard), "image_digests": record.image_digests.hex()}
        write_json(self._records / f"{record.shard.file}.json", content)

    def recover(self, marks: Mapping[str, tuple[str, str]]) -> tuple[dict[str, ShardRecord], int]:
        """Keep finished shards that match `marks` (file -> split, mark); delete the rest, and count its records."""
        found: dict[str, ShardRecord] = {}
        kept: set[Path] = set()
        records = list(self._records.glob("*.json"))
        for path in records:
            record = _read_record(path)
            if record is None or not all(refused.was_read for refused in record.refused):
                continue
            split, mark = marks.get(record.shard.file, ("", ""))
            tar = self.result / split / record.shard.file
            sizes = (record.shard.num_bytes, record.index_bytes)
            if mark == record.mark and (_size(tar), _size(index_path(tar))) == sizes:
                found[record.shard.file] = record
                kept |= {self._records / f"{record.shard.file}.json", tar, index_path(tar)}
        for path in sorted(self.path.rglob("*"), reverse=True):  # contents before their folder
            if not path.is_dir() or path.is_symlink():
                if path not in kept:
                    path.unlink()
            elif not any(path.iterdir()):
                path.rmdir()
        for folder in (self._records, *(self.result / split for split, _ in marks.values())):
            folder.mkdir(parents=True, exist_ok=True)
        return found, len(records) - len(found)


@contextmanager
def open_work(out: Path) -> Iterator[WorkFolder]:
    """Create or take over `.OUT.packing`; UserError if that fails. Removed at the end if no shard is finished."""
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
    """`a/OUT` -> `a/.OUT.unpacked`, for decompressed archives until OUT is complete."""
    return work_path(out).with_suffix(".unpacked")


def _read_record(path: Path) -> ShardRecord | None:
    try:
        content: dict[str, Any] = parse_json(path.read_bytes())
        content |= {"shard": Shard(**content["shard"]), "image_digests": bytes.fromhex(content["image_digests"])}
        return ShardRecord(**{**content, "refused": tuple(RefusedImage(*entry) for entry in content["refused"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def write_shards(
    plans: Mapping[Path, ShardPlan],
    request: PackRequest,
    *,
    num_threads: int,
    progress: Progress,
    save: Callable[[ShardRecord], None],
) -> dict[str, ShardRecord]:
    """Write each plan to its path, then `save` its record; an OSError (disk full) leaves no unfinished tar."""
    stop = threading.Event()

    def write(path: Path, plan: ShardPlan) -> ShardRecord | None:
        record = None
        try:
            record = None if stop.is_set() else _write(plan, path, request, stop, progress)
            if record is not None:
                save(record)
        except BaseException:
            stop.set()  # here: the main thread only notices when it waits for this shard
            record = None
            raise
        finally:
            if record is None:
                path.unlink(missing_ok=True)
        return record

    # Pillow warns about large photographs and odd metadata; only undecodable images matter here. The filter is
    # process-wide, so it is set around all threads.
    with warnings.catch_warnings(action="ignore"):
        records = list(run_threads(write, plans.items(), threads=num_threads, stop=stop))
    return {record.shard.file: record for record in records if record is not None}


def plan_mark(plan: ShardPlan, request: PackRequest) -> str:
    """Hash everything the tar's bytes depend on: images, labels, order, options, library versions."""
    options = (plan.file, request.resize, request.pixel_limit, version("pillow"), version("simplejpeg"))
    digest = hashlib.sha256(repr(options).encode())
    digest.update(plan.labels.tobytes())
    digest.update(plan.images.stamps.tobytes())
    for position in range(len(plan)):
        digest.update(f"\0{plan.key(position)}".encode())
    return digest.hexdigest()


def image_digest(data: bytes | None) -> bytes:
    """Hash the bytes of an image; zeros for None."""
    return bytes(DIGEST_BYTES) if data is None else hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def read_digests(parts: Sequence[ImageSet], *, num_threads: int, progress: Progress) -> bytes:
    """Hash all images of the parts in order; zeros for unreadable ones."""
    stop = threading.Event()

    def digest_image(images: ImageSet, index: int) -> bytes:
        try:
            return image_digest(images.read(index))
        except OSError:
            return image_digest(None)

    def digest_part(images: ImageSet) -> bytes:
        digests = b"".join(digest_image(images, index) for index in range(len(images)) if not stop.is_set())
        progress.add(len(images))
        return digests

    return b"".join(run_threads(digest_part, zip(parts), threads=num_threads, stop=stop))


def _write(
    plan: ShardPlan, path: Path, request: PackRequest, stop: threading.Event, progress: Progress
) -> ShardRecord | None:
    digests: list[bytes] = []
    refused: list[RefusedImage] = []
    with open(path, "wb", buffering=_BUFFER_BYTES) as stream, tar_writer(tar := _Digested(stream)) as writer:
        for position in range(len(plan)):
            if stop.is_set():
                return None
            data = None
            try:
                data = plan.images.read(position)
                image = prepare_image(data, resize=request.resize, limit=request.pixel_limit)
            except (UnreadableImage, OSError) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                refused.append(RefusedImage(position, reason, was_read=data is not None))
            else:
                extension, label = plan.label_member(position)
                writer.write({"__key__": plan.key(position), image.extension: image.data, extension: label})
            digests.append(image_digest(data))
            progress.add(1)
    part = LABEL_SPECS["single" if plan.labels.ndim == 1 else "multi"].part
    write_index(build_index(path, label=part), index_path(path), label=part)
    for each in (path, index_path(path)):
        flush(each)
    return ShardRecord(
        mark=plan_mark(plan, request),
        shard=Shard(plan.file, len(plan) - len(refused), tar.num_bytes, tar.digest.hexdigest()),
        index_bytes=index_path(path).stat().st_size,
        image_digests=b"".join(digests),
        refused=tuple(refused),
    )


class _Digested:
    """Hash a tar while writing it, which saves reading it back."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.digest = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        self.digest.update(data)
        self.num_bytes += len(data)
        self._stream.write(data)

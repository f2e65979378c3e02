"""Writes planned shards: reads and verifies each image, then tar, index and record, several shards at a time.

Threads suffice: decoding, hashing, reading and writing go without the GIL, and the rest is 80 µs an image (so one
process packs at most some 10,000 images/s, more than disks deliver of photographs). Memory is one image per thread,
as stored and decoded (0.5 GB for the largest that is let in). Tars are byte-identical for equal plans: mtime, owner
and order are fixed. An image that cannot be read is left out of its shard and noted in the shard's record; whether
that ends the packing is for the caller to say. A shard is one thread's work, so few large shards use few cores.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

from data_shards.durable import flush
from data_shards.errors import UnreadableImage
from data_shards.images.decode import PixelLimit
from data_shards.manifest import Shard
from data_shards.packing.image import PACKED_LIMIT, Resize, prepare_image
from data_shards.packing.shard_plan import LABEL_SPECS, ShardPlan
from data_shards.packing.work import DIGEST_BYTES, Refused, ShardRecord
from data_shards.progress_line import Progress
from data_shards.tars.tar_index import build_index, index_path, write_index
from data_shards.webdataset_parts import tar_writer

PROGRESS_STEP_IMAGES = 50  # per thread, between two updates
_BUFFER_BYTES = 1 << 20


def write_shards(
    plans: Mapping[Path, ShardPlan],
    *,
    resize: Resize | None,
    limit: PixelLimit = PACKED_LIMIT,
    num_threads: int,
    progress: Progress,
    save: Callable[[ShardRecord], None],
) -> dict[str, ShardRecord]:
    """Write each plan to its path, the index beside it, and hand its record to `save` when both are on the disk.

    Returns the records by file. OSError in writing (a full disk) passes through, and leaves no unfinished tar.
    """
    stop = threading.Event()
    # Pillow warns of large photographs and odd metadata; here only what cannot be decoded matters. (The
    # filter is one for the whole process, so it is set around all threads.)
    with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor(num_threads) as pool:
        futures = [
            pool.submit(_write_shard, plan, path, resize, limit, stop, progress, save) for path, plan in plans.items()
        ]
        try:
            records = [future.result() for future in futures]
        except BaseException:  # Ctrl-C too: the threads would go on to their end otherwise
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return {record.shard.file: record for record in records if record is not None}


def plan_mark(plan: ShardPlan, *, resize: Resize | None, limit: PixelLimit = PACKED_LIMIT) -> str:
    """Changes with whatever the bytes of the tar depend on: images, labels, order, options, versions of libraries."""
    digest = hashlib.sha256(repr((plan.file, resize, version("pillow"), version("simplejpeg"))).encode())
    if limit != PACKED_LIMIT:
        digest.update(f"{limit.pixels} pixels".encode())
    digest.update(plan.labels.tobytes())
    for position, index in enumerate(plan.indices.tolist()):
        stamp = plan.images.stamp(index)
        digest.update(f"\0{plan.key(position)}\0{len(stamp)}\0".encode())
        digest.update(stamp)
    return digest.hexdigest()


def image_digest(data: bytes) -> bytes:
    """By which images with the same bytes are found."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def read_digests(plans: Sequence[ShardPlan], *, num_threads: int, progress: Progress) -> bytes:
    """Digests of all planned images, in plan order; zeros for those that cannot be read."""

    def of_shard(plan: ShardPlan) -> bytes:
        digests: list[bytes] = []
        for index in plan.indices.tolist():
            if stop.is_set():
                break
            try:
                digests.append(image_digest(plan.images.read(index)))
            except OSError:
                digests.append(bytes(DIGEST_BYTES))
        progress.add(len(plan))
        return b"".join(digests)

    stop = threading.Event()
    with ThreadPoolExecutor(num_threads) as pool:
        futures = [pool.submit(of_shard, plan) for plan in plans]
        try:
            return b"".join(future.result() for future in futures)
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _write_shard(
    plan: ShardPlan,
    path: Path,
    resize: Resize | None,
    limit: PixelLimit,
    stop: threading.Event,
    progress: Progress,
    save: Callable[[ShardRecord], None],
) -> ShardRecord | None:
    if stop.is_set():
        return None
    try:
        record = _write(plan, path, resize, limit, stop, progress)
        if record is not None:
            save(record)
            return record
    except BaseException:
        stop.set()  # at once: the main thread hears of it only when it asks for this shard
        path.unlink(missing_ok=True)
        raise
    path.unlink(missing_ok=True)
    return None


def _write(
    plan: ShardPlan,
    path: Path,
    resize: Resize | None,
    limit: PixelLimit,
    stop: threading.Event,
    progress: Progress,
) -> ShardRecord | None:
    digests: list[bytes] = []
    refused: list[Refused] = []
    done = 0
    with open(path, "wb", buffering=_BUFFER_BYTES) as stream, tar_writer(tar := _Digested(stream)) as writer:
        for position, index in enumerate(plan.indices.tolist()):
            if stop.is_set():
                return None
            data = None
            try:
                data = plan.images.read(index)
                image = prepare_image(data, resize=resize, limit=limit)
            except (UnreadableImage, OSError) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                refused.append(Refused(position, reason, was_read=data is not None))
            else:
                extension, label = plan.label_member(position)
                writer.write({"__key__": plan.key(position), image.extension: image.data, extension: label})
            digests.append(bytes(DIGEST_BYTES) if data is None else image_digest(data))
            done += 1
            if done == PROGRESS_STEP_IMAGES:
                progress.add(done)
                done = 0
    flush(path)
    part = LABEL_SPECS["single" if plan.labels.ndim == 1 else "multi"].part
    write_index(build_index(path, label=part), index_path(path), label=part)
    flush(index_path(path))
    progress.add(done)
    return ShardRecord(
        mark=plan_mark(plan, resize=resize, limit=limit),
        shard=Shard(plan.file, len(plan) - len(refused), tar.num_bytes, tar.digest.hexdigest()),
        index_bytes=index_path(path).stat().st_size,
        image_digests=b"".join(digests),
        refused=tuple(refused),
    )


class _Digested:
    """What a tar is written to: a file, with the digest of what it gets, which saves reading it again."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.digest = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        self.digest.update(data)
        self.num_bytes += len(data)
        self._stream.write(data)

"""Write planned shards: read and verify each image, then write tar, index and record, several shards at a time.

Threads suffice: decoding, hashing and I/O release the GIL, and the rest is 80 µs an image (at most some 10,000
images/s, more than disks deliver of photographs). Memory is one image per thread, as stored and decoded (at most 0.5
GB). A shard is one thread's work, so few large shards use few cores. Unreadable images are left out and recorded.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from data_shards.durable import flush
from data_shards.errors import UnreadableImage
from data_shards.packing.image import prepare_image
from data_shards.packing.request import PackRequest
from data_shards.packing.shard_plan import LABEL_SPECS, ShardPlan
from data_shards.packing.sources.base import ImageSet
from data_shards.packing.work import DIGEST_BYTES, RefusedImage, ShardRecord
from data_shards.progress_line import Progress
from data_shards.shards.manifest import Shard
from data_shards.shards.tar_index import build_index, index_path, write_index
from data_shards.shards.webdataset_parts import tar_writer

_BUFFER_BYTES = 1 << 20
_Result = TypeVar("_Result")


def write_shards(
    plans: Mapping[Path, ShardPlan],
    request: PackRequest,
    *,
    num_threads: int,
    progress: Progress,
    save: Callable[[ShardRecord], None],
) -> dict[str, ShardRecord]:
    """Write each plan to its path with the index beside it, then `save` its record; return the records by file.

    OSError in writing (a full disk) passes through, and leaves no unfinished tar.
    """
    stop = threading.Event()

    def write(path: Path, plan: ShardPlan) -> ShardRecord | None:
        record = None
        try:
            if not stop.is_set():
                record = _write(plan, path, request, stop, progress)
            if record is not None:
                save(record)
        except BaseException:
            stop.set()  # at once: the main thread learns of it only when it waits for this shard
            path.unlink(missing_ok=True)
            raise
        if record is None:
            path.unlink(missing_ok=True)
        return record

    # Pillow warns of large photographs and odd metadata; here only what cannot be decoded matters. (The filter is
    # process-wide, so it is set around all threads.)
    with warnings.catch_warnings(action="ignore"):
        records = _on_threads(write, plans.items(), num_threads=num_threads, stop=stop)
    return {record.shard.file: record for record in records if record is not None}


def plan_mark(plan: ShardPlan, request: PackRequest) -> str:
    """Changes with whatever the bytes of the tar depend on: images, labels, order, options, versions of libraries."""
    options = (plan.file, request.resize, request.pixel_limit, version("pillow"), version("simplejpeg"))
    digest = hashlib.sha256(repr(options).encode())
    digest.update(plan.labels.tobytes())
    for position, index in enumerate(plan.indices.tolist()):
        stamp = plan.images.stamp(index)
        digest.update(f"\0{plan.key(position)}\0{len(stamp)}\0".encode())
        digest.update(stamp)
    return digest.hexdigest()


def image_digest(data: bytes | None) -> bytes:
    """Equal for images with the same bytes; zeros for one that could not be read."""
    return bytes(DIGEST_BYTES) if data is None else hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def read_digests(parts: Sequence[tuple[ImageSet, NDArray[np.int64]]], *, num_threads: int, progress: Progress) -> bytes:
    """Digests of the images with these indices, in this order; zeros for one that cannot be read."""
    stop = threading.Event()

    def of_image(images: ImageSet, index: int) -> bytes:
        try:
            return image_digest(images.read(index))
        except OSError:
            return image_digest(None)

    def of_part(images: ImageSet, indices: NDArray[np.int64]) -> bytes:
        digests = b"".join(of_image(images, index) for index in indices.tolist() if not stop.is_set())
        progress.add(len(indices))
        return digests

    return b"".join(_on_threads(of_part, parts, num_threads=num_threads, stop=stop))


def _on_threads(
    function: Callable[..., _Result], arguments: Iterable[tuple[Any, ...]], *, num_threads: int, stop: threading.Event
) -> list[_Result]:
    with ThreadPoolExecutor(num_threads) as pool:
        futures = [pool.submit(function, *each) for each in arguments]
        try:
            return [future.result() for future in futures]
        except BaseException:  # Ctrl-C too: the threads would go on to their end otherwise
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _write(
    plan: ShardPlan, path: Path, request: PackRequest, stop: threading.Event, progress: Progress
) -> ShardRecord | None:
    digests: list[bytes] = []
    refused: list[RefusedImage] = []
    with open(path, "wb", buffering=_BUFFER_BYTES) as stream, tar_writer(tar := _Digested(stream)) as writer:
        for position, index in enumerate(plan.indices.tolist()):
            if stop.is_set():
                return None
            data = None
            try:
                data = plan.images.read(index)
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
    """A tar's file, digested while it is written, which saves reading it again."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.digest = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        self.digest.update(data)
        self.num_bytes += len(data)
        self._stream.write(data)

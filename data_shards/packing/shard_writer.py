"""Verify images and write one planned shard: tar, index, then the record that it is finished.

`make_shard` depends on the plan alone, so threads, processes and machines may call it in any order, and again. A shard
is finished if its record has its mark (images, labels, options), and tar and index have the recorded sizes; anything
else is written anew. Memory: one image, encoded and decoded (at most 0.5 GB). Decoding, hashing and I/O release the
interpreter's lock; the rest is 80 µs an image.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

from shardvit.data_shards.engines.threads import ThreadEngine, give_up_if_stopped
from shardvit.data_shards.errors import UnreadableImage
from shardvit.data_shards.packing.image import prepare_image
from shardvit.data_shards.packing.shard_plan import LABEL_SPECS, ShardPlan, class_numbers
from shardvit.data_shards.packing.sources.base import ImageSet
from shardvit.data_shards.packing.work import scratch_folder
from shardvit.data_shards.progress_line import Progress
from shardvit.data_shards.sets.statistics import (
    DIGEST_BYTES,
    SampleStatistics,
    data_digest,
    image_statistics,
    to_parquet,
)
from shardvit.data_shards.shards.location import is_local
from shardvit.data_shards.shards.manifest import Shard
from shardvit.data_shards.shards.tar_index import build_index, index_path, write_index
from shardvit.data_shards.shards.webdataset_parts import tar_writer
from shardvit.data_shards.store.download import StoreError
from shardvit.data_shards.text import parse_json

if TYPE_CHECKING:
    from shardvit.data_shards.images.decode import PixelLimit
    from shardvit.data_shards.packing.image import Resize
    from shardvit.data_shards.packing.plan_file import PackJob

_BUFFER_BYTES = 1 << 20
_REQUESTS = 16  # to a store, at a time


class RefusedImage(NamedTuple):
    """An image missing from its tar. `was_read`: its bytes could be read, so a retry will not help."""

    position: int
    reason: str
    was_read: bool


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard; `image_digests` has `DIGEST_BYTES` per planned image, zeros if unread."""

    mark: str  # see `PlanTable`
    shard: Shard  # the tar's entry in the manifest
    index_bytes: int
    image_digests: bytes
    refused: tuple[RefusedImage, ...]  # planned images missing from the tar
    dtypes: tuple[str, ...] = ()  # of its images' values, where channels are asked for


class MadeShard(NamedTuple):
    """What `make_shard` tells of a shard, besides its record."""

    number: int
    num_images: int  # planned


def make_shard(job: PackJob, number: int) -> MadeShard:
    """Make a planned shard, unless it is finished: put index and tar into the result, then write its record."""
    made = MadeShard(number, job.plan.sizes[number])
    if find_record(job, number) is not None:
        return made
    plan, file = job.shard(number), job.file(number)
    with scratch_folder(job.out) as own:
        tar = own / plan.file
        options = {"resize": job.resize, "pixel_limit": job.pixel_limit, "channels": job.channels}
        record = write_shard(plan, tar, mark=job.plan.marks[number], **options)
        for each in (index_path(tar), tar):
            job.result.put(f"{file.rpartition('/')[0]}/{each.name}", each)
        job.work.write(statistics_file(file), _statistics_path(tar).read_bytes())
    content = {**vars(record), "shard": record.shard.as_json(), "image_digests": record.image_digests.hex()}
    job.work.write(record_file(file), json.dumps(content).encode())
    return made


def find_record(job: PackJob, number: int, *, unread: Literal["retry", "accept"] = "retry") -> ShardRecord | None:
    """Return a finished shard's record; None if it has to be made: "retry", also where an image could not be read."""
    file = job.file(number)
    try:
        content: dict[str, Any] = parse_json(job.work.read(record_file(file)))
        content |= {"shard": Shard(**content["shard"]), "image_digests": bytes.fromhex(content["image_digests"])}
        record = ShardRecord(**{**content, "refused": tuple(RefusedImage(*entry) for entry in content["refused"])})
        good = record.mark == job.plan.marks[number]
        good &= unread == "accept" or all(refused.was_read for refused in record.refused)
    except StoreError:
        raise
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    sizes = ((file, record.shard.num_bytes), (index_file(file), record.index_bytes))
    return record if good and all(job.result.size(name) == size for name, size in sizes) else None


def find_records(job: PackJob, *, unread: Literal["retry", "accept"] = "retry") -> Iterator[ShardRecord | None]:
    """Find all shards' records, in order; see `find_record`."""
    with ThreadPoolExecutor(1 if is_local(job.out) else _REQUESTS) as pool:
        yield from pool.map(lambda number: find_record(job, number, unread=unread), range(len(job.plan.sizes)))


def record_file(file: str) -> str:
    """`train/x-000001.tar` -> `records/x-000001.tar.json`."""
    return f"records/{file.rpartition('/')[2]}.json"


def index_file(file: str) -> str:
    """`train/x-000001.tar` -> `train/x-000001.idx`."""
    return f"{file.removesuffix('.tar')}.idx"


def statistics_file(file: str) -> str:
    """`train/x-000001.tar` -> `statistics/x-000001.parquet`."""
    return f"statistics/{file.rpartition('/')[2].removesuffix('.tar')}.parquet"


def _statistics_path(tar: Path) -> Path:
    return tar.with_suffix(".parquet")


def image_digest(data: bytes | None) -> bytes:
    """Hash the bytes of an image; zeros for None."""
    return bytes(DIGEST_BYTES) if data is None else data_digest(data)


def digest_shard(job: PackJob, number: int) -> bytes:
    """Hash all images of a shard of the whole plan in order; zeros for unreadable ones."""
    return _digest_all(job.shard(number, job.whole).images)


def read_digests(parts: Sequence[ImageSet], *, num_threads: int, progress: Progress) -> bytes:
    """Hash all images of the parts in order; zeros for unreadable ones."""

    def digest_part(images: Sequence[ImageSet], number: int) -> bytes:
        return _digest_all(images[number])

    def add(digests: bytes) -> None:
        progress.add(len(digests) // DIGEST_BYTES)

    return b"".join(ThreadEngine(num_threads).run(digest_part, parts, range(len(parts)), done=add).values())


def _digest_all(images: ImageSet) -> bytes:
    digests: list[bytes] = []
    for index in range(len(images)):
        give_up_if_stopped()
        data = None
        with suppress(OSError):
            data = images.read(index)
        digests.append(image_digest(data))
    return b"".join(digests)


def write_shard(
    plan: ShardPlan,
    path: Path,
    *,
    pixel_limit: PixelLimit,
    resize: Resize | None = None,
    mark: str = "",
    channels: int = 0,
) -> ShardRecord:
    """Write the tar, and beside it its index and the rows of its statistics."""
    digests: list[bytes] = []
    statistics: list[SampleStatistics] = []
    refused: list[RefusedImage] = []
    dtypes: set[str] = set()
    with open(path, "wb", buffering=_BUFFER_BYTES) as stream, tar_writer(tar := _Digested(stream)) as writer:
        for position in range(len(plan)):
            give_up_if_stopped()
            data, digest = None, image_digest(None)
            try:
                data = plan.images.read(position)
                digest = image_digest(data)
                image = prepare_image(data, resize=resize, limit=pixel_limit, channels=channels)
            except (UnreadableImage, OSError) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                refused.append(RefusedImage(position, reason, was_read=data is not None))
            else:
                extension, label = plan.label_member(position)
                key, labels = plan.key(position), class_numbers(plan.labels[position])
                writer.write({"__key__": key, image.extension: image.data, extension: label})
                dtypes |= {image.dtype} if channels else set()
                own = digest if image.data is data else image_digest(image.data)
                measured = image_statistics(image.pixels, image.data, digest=own)
                trace = plan.images.trace(position)
                statistics.append(SampleStatistics(len(statistics), key, trace, labels, measured))
            digests.append(digest)
    part = LABEL_SPECS["single" if plan.labels.ndim == 1 else "multi"].part
    write_index(build_index(path, label=part), index_path(path), label=part)
    _statistics_path(path).write_bytes(to_parquet(statistics, channels=channels))
    return ShardRecord(
        mark=mark,
        shard=Shard(plan.file, len(plan) - len(refused), tar.num_bytes, tar.digest.hexdigest()),
        index_bytes=index_path(path).stat().st_size,
        image_digests=b"".join(digests),
        refused=tuple(refused),
        dtypes=tuple(sorted(dtypes)),
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

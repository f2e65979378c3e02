"""Writes planned shards: reads and verifies each image, then tar, index and digest, several shards at a time.

Every image is decoded once, in full, because a broken one is cheap to mend now and expensive in the middle of
a run. Threads suffice: Pillow decodes and hashlib hashes without the GIL; memory stays at one image per
thread. Tars are byte-identical for equal plans (mtime, owner and order are fixed). After the first unreadable
image nothing more is written, but the rest is still looked at, so the user hears of all at once.
"""

import hashlib
import io
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from data_shards.manifest import Shard
from data_shards.pack_plan import ShardPlan
from data_shards.tar_index import build_index, index_path, write_index

# What the bytes are decides a member's extension, not the file's name: ImageNet has a PNG named .JPEG.
# MPO is a JPEG with more JPEGs after it, as some cameras write.
EXTENSIONS = {
    "JPEG": "jpg",
    "MPO": "jpg",
    "PNG": "png",
    "WEBP": "webp",
    "BMP": "bmp",
    "GIF": "gif",
    "TIFF": "tif",
    "PPM": "ppm",
}
PROGRESS_STEP_IMAGES = 50  # per thread, between two updates
PROGRESS_LINE_SECONDS = 5.0


class UnreadableImage(Exception):
    """`str(error)` is the reason."""


@dataclass(frozen=True)
class WrittenShards:
    """Either all `shards`, in the plans' order, or `unreadable`: (where from, reason), in the plans'
    order.
    """

    shards: list[Shard]
    unreadable: list[tuple[str, str]]


def image_extension(data: bytes) -> str:
    """The extension for an encoded image, after decoding all of it. Raises UnreadableImage."""
    from PIL import Image

    if not data:
        raise UnreadableImage("the file is empty")
    try:
        # MPO has no opener of its own: the one of JPEG recognises it.
        with Image.open(io.BytesIO(data), formats=[name for name in EXTENSIONS if name != "MPO"]) as image:
            image.load()
            return EXTENSIONS[str(image.format)]
    except Image.UnidentifiedImageError:
        raise UnreadableImage("not an image of a known format") from None
    except MemoryError:  # the machine's fault, not the image's
        raise
    except Exception as error:  # noqa: BLE001 - Pillow's plugins raise a dozen kinds, struct.error and SyntaxError too
        raise UnreadableImage(str(error) or type(error).__name__) from None


def write_shards(plans: Sequence[ShardPlan], folder: Path, *, num_threads: int, progress: "Progress") -> WrittenShards:
    """Write each plan to `folder/plan.file` and its index beside it. OSError (a full disk) passes through."""
    failed, stop = threading.Event(), threading.Event()
    # Pillow warns of large photographs and odd metadata; here only what cannot be decoded matters. (The
    # filter is one for the whole process, so it is set around all threads.)
    with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor(num_threads) as pool:
        futures = [pool.submit(_write_shard, plan, folder, failed, stop, progress) for plan in plans]
        try:
            results = [future.result() for future in futures]
        except BaseException:  # Ctrl-C too: the threads would go on to their end otherwise
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return WrittenShards(
        shards=[shard for shard, _ in results if shard is not None],
        unreadable=[entry for _, unreadable in results for entry in unreadable],
    )


def _write_shard(
    plan: ShardPlan, folder: Path, failed: threading.Event, stop: threading.Event, progress: "Progress"
) -> tuple[Shard | None, list[tuple[str, str]]]:
    from webdataset.writer import TarWriter  # imports torch

    path = folder / plan.file
    unreadable: list[tuple[str, str]] = []
    done = 0
    with open(path, "wb") as stream:
        hashing = _HashingStream(stream)
        with TarWriter(cast(Any, hashing), encoder=False, mtime=0, user="", group="") as tar:
            for position, (index, label) in enumerate(zip(plan.indices.tolist(), plan.labels.tolist(), strict=True)):
                if stop.is_set():
                    return None, unreadable
                try:
                    data = plan.images.read(index)
                    extension = image_extension(data)
                except (UnreadableImage, OSError) as error:
                    unreadable.append((plan.images.trace(index), str(error)))
                    failed.set()
                else:
                    if not failed.is_set():
                        tar.write(
                            {
                                "__key__": plan.key(position),
                                extension: data,
                                "cls": str(label).encode("ascii"),
                            }
                        )
                done += 1
                if done == PROGRESS_STEP_IMAGES:
                    progress.add(done)
                    done = 0
        stream.flush()
        os.fsync(stream.fileno())
    progress.add(done)
    if failed.is_set():
        return None, unreadable
    write_index(build_index(path), index_path(path))
    return Shard(plan.file, len(plan), hashing.num_bytes, hashing.digest.hexdigest()), unreadable


class _HashingStream:
    """A file that is only written to, with the digest of what was written: saves reading the tar again."""

    def __init__(self, stream: io.BufferedWriter) -> None:
        self._stream = stream
        self.digest = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.num_bytes += len(data)
        return self._stream.write(data)


class Progress:
    """Counts images: a tqdm bar on a terminal, else a line through `report` every few seconds. Safe across
    threads.
    """

    def __init__(self, total_images: int, report: Callable[[str], None]) -> None:
        self._total = total_images
        self._report = report
        self._lock = threading.Lock()
        self._done = 0
        self._start = self._last_line = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total_images, unit="img", desc="packing", leave=False)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, num_images: int) -> None:
        with self._lock:
            self._done += num_images
            if self._bar is not None:
                self._bar.update(num_images)
                return
            now = time.monotonic()
            if now - self._last_line >= PROGRESS_LINE_SECONDS and self._done < self._total:
                self._last_line = now
                speed = self._done / (now - self._start)
                self._report(f"packed {self._done:,} of {self._total:,} images ({speed:,.0f} images/s)")

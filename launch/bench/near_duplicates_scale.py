"""Join synthetic fingerprints on disk, as `check SET --against SET` does with large sets: time, memory, disk, recall.

Run `python -m shardvit.launch.bench.near_duplicates_scale --images 1000000 --work FOLDER`; what it printed is in
records/near_duplicates_scale.txt. Images are random cosines with the spectrum of photographs; every hundredth is an
edited copy of an earlier one, every thousandth belongs to a crowd of pictures that are nearly the same. Thumbnails are
computed when loaded, so the disk holds only what the join writes; hashing images and second looks at the candidates are
measured by near_duplicates.txt.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.checking.near_duplicates.disk_join import find_on_disk
from shardvit.data_shards.checking.near_duplicates.fingerprint import ROW, Fingerprints, KeptFingerprints
from shardvit.data_shards.checking.near_duplicates.perceptual_hash import sampling
from shardvit.data_shards.engines.engine import PartsEngine, local_engine

_PART = 1 << 14
_EDITS = ("re-encoded", "mirrored", "cropped 95 %", "cropped 90 %", "equal bytes")
_EACH = 100  # images to one copy
_CROWD = 1000  # images to one of the crowd
_FREQUENCIES = 16
Numbers = NDArray[np.int64]


def _hashed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix 64 bits (splitmix64)."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def _shares(numbers: Numbers, each: int, *, stream: int) -> NDArray[np.float32]:
    """Draw `each` numbers from 0 to 1 for each image."""
    counters = numbers.astype(np.uint64)[:, None] * np.uint64(1024) + np.arange(each, dtype=np.uint64)
    return (_hashed(counters + np.uint64(stream << 56)) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)


def sources(numbers: Numbers) -> Numbers:
    """Number each image's original: itself unless it is a copy."""
    is_copy = (numbers % _EACH == 0) & (numbers > 0)
    earlier = (_hashed(numbers.astype(np.uint64)) % np.maximum(numbers, 1).astype(np.uint64)).astype(np.int64)
    earlier += (earlier % _EACH == 0) & (earlier + 1 < numbers)  # no copies of copies
    return np.where(is_copy, earlier, numbers)


def _cosines() -> NDArray[np.float32]:
    places = (np.arange(32) + 0.5) / 32
    return np.cos(np.pi * np.arange(_FREQUENCIES)[:, None] * places).astype(np.float32)


def _drawn(numbers: Numbers) -> NDArray[np.float32]:
    drawn = _shares(numbers, _FREQUENCIES**2, stream=1).reshape(-1, _FREQUENCIES, _FREQUENCIES) - 0.5
    in_crowd = (numbers % _CROWD == 1)[:, None, None]
    drawn = np.where(
        in_crowd, 0.1 * drawn + _shares(np.array([1]), drawn[0].size, stream=2).reshape(drawn[:1].shape) - 0.5, drawn
    )
    frequency = np.add.outer(np.arange(_FREQUENCIES), np.arange(_FREQUENCIES))
    drawn = drawn * np.where(frequency > 0, 200 / np.maximum(1, frequency), 0).astype(np.float32)
    cosines = _cosines()
    return (128 + cosines.T @ drawn @ cosines).astype(np.float32)


def made_thumbnails(numbers: Numbers) -> NDArray[np.uint8]:
    """Draw thumbnails, those of copies edited."""
    source = sources(numbers)
    greys = _drawn(source)
    edits = numbers // _EACH % len(_EDITS)
    for edit, name in enumerate(_EDITS):
        rows = np.flatnonzero((source != numbers) & (edits == edit))
        if name == "re-encoded":
            greys[rows] += 10 * (_shares(numbers[rows], 1024, stream=3).reshape(-1, 32, 32) - 0.5)
        elif name == "mirrored":
            greys[rows] = greys[rows][..., ::-1]
        elif name.startswith("cropped"):
            side = int(name.split()[1]) / 100
            top, left = ((1 - side) * _shares(numbers[rows], 2, stream=4)).T
            greys[rows] = (
                sampling(top, top + side, 32) @ greys[rows] @ sampling(left, left + side, 32).transpose(0, 2, 1)
            )
    return greys.clip(0, 255).astype(np.uint8)


@dataclass(frozen=True)
class _Drawn(KeptFingerprints):
    def load(self, part: int) -> Fingerprints:
        numbers = np.arange(self.starts[part], self.starts[part + 1])
        rows = np.zeros(len(numbers), ROW)
        source = sources(numbers)
        is_equal = numbers // _EACH % len(_EDITS) == _EDITS.index("equal bytes")
        rows["bytes_digest"] = _hashed(np.where(is_equal, source, numbers).astype(np.uint64))[:, None]
        chunks = [made_thumbnails(numbers[at : at + 1024]) for at in range(0, len(numbers), 1024)]
        rows["thumbnail"] = np.concatenate(chunks)
        return rows

    def thumbnails(self, images: Numbers) -> NDArray[np.uint8]:
        chunks = [made_thumbnails(images[at : at + 1024]) for at in range(0, len(images), 1024)]
        return np.concatenate(chunks)


class _Watch(threading.Thread):
    """The most bytes that a folder had, looked at twice a second."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.most = folder, 0
        self.start()

    def run(self) -> None:
        while True:
            total = 0
            for entry in os.scandir(self.folder):
                try:
                    total += entry.stat().st_size
                except OSError:
                    continue
            self.most = max(self.most, total)
            time.sleep(0.5)


def main() -> None:
    """Join and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=1_000_000)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=None)
    given = parser.parse_args()
    sizes = tuple(min(_PART, given.images - at) for at in range(0, given.images, _PART))
    images = _Drawn("drawn", "drawn", sizes, ())
    shutil.rmtree(given.work, ignore_errors=True)
    given.work.mkdir(parents=True)
    watch = _Watch(given.work)
    start = time.monotonic()
    phases: dict[str, float] = {}
    engine = _Timed(local_engine(given.processes), phases)
    files = find_on_disk(images, images, folder=given.work, engine=engine, report=lambda line: print(line, flush=True))
    seconds = time.monotonic() - start
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = resource.getrusage(resource.RUSAGE_SELF)  # few parts are done by the driver
    cpu = sum(each.ru_utime + each.ru_stime for each in (children, own))
    rss, own_rss = children.ru_maxrss / 2**10, own.ru_maxrss / 2**10
    pairs = np.concatenate([np.load(file) for file in files])
    print(f"\nPython {platform.python_version()}, NumPy {np.__version__}, {engine.workers} processes")
    each = f"{1e6 * cpu / given.images:.0f} us an image"
    print(f"{given.images:,} images with themselves: {seconds:,.0f} s, {cpu:,.0f} s of cores, {each}")
    print("  " + ", ".join(f"{name[1:].replace('_', ' ')} {each:,.0f} s" for name, each in phases.items()))
    print(f"memory: a worker at most {rss:,.0f} MiB, the driver {own_rss:,.0f} MiB")
    print(f"disk: at most {watch.most / 1e9:.2f} GB, {watch.most / given.images:,.0f} bytes an image")
    crowd = pairs["image"] % _CROWD == 1
    print(f"candidates: {len(pairs):,}, of the crowd {crowd.sum():,}")
    copies = np.arange(_EACH, given.images, _EACH)
    found = np.isin(copies * given.images + sources(copies), pairs["image"] * given.images + pairs["other"])
    for edit, name in enumerate(_EDITS):
        of_edit = copies // _EACH % len(_EDITS) == edit
        print(f"  {name:14}{of_edit.sum():9,} planted, recall {found[of_edit].mean():.4f}")
    outside = pairs[~crowd & (pairs["image"] % _EACH != 0)]
    print(f"candidates of neither a copy nor the crowd: {len(outside):,}")
    shutil.rmtree(given.work)


@dataclass(frozen=True)
class _Timed:
    engine: PartsEngine
    phases: dict[str, float]

    @property
    def workers(self) -> int:
        return self.engine.workers

    def run(self, work: Callable[..., Any], request: Any, parts: Sequence[Any], *, done: Callable[..., None]) -> Any:
        start = time.monotonic()
        try:
            return self.engine.run(work, request, parts, done=done)
        finally:
            self.phases[work.__name__] = self.phases.get(work.__name__, 0) + time.monotonic() - start


if __name__ == "__main__":
    main()

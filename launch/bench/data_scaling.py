"""`--threads` and `--from` of the data benchmark: more decoding threads, and stores instead of a local folder.

    local     our loader with each number of threads, and limits for more (`data_threads`)
    http, s3  readers of a store on loopback, with delays, once with each number of workers (`data_remote`); default 2

Costs 2 minutes for local and 5 a store on two idle cores, with 4,000 images and 3 rounds.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from shardvit.data_shards.errors import UserError
from shardvit.launch.bench.data_methods import WORKERS, Work
from shardvit.launch.bench.data_prepare import Photographs, read_photographs
from shardvit.launch.bench.data_remote import DELAYS_MS, READERS, measure_remote, prepare_remote, remote_lines
from shardvit.launch.bench.data_server import StoreKind
from shardvit.launch.bench.data_threads import copy_bytes_per_second, measure_threads, scaling_lines, split_threads
from shardvit.launch.bench.measure import heading

_LEAST_IMAGES = 64 * 8


def scale(
    source: Path,
    *,
    images: int,
    rounds: int,
    threads: Sequence[int] | None,
    beyond_cores: bool,
    places: Sequence[str],
    record: Path | None,
    delays_ms: Sequence[float] = DELAYS_MS,
    readers: Sequence[str] = READERS,
) -> list[str]:
    """Measure at each place, print the report, write it to `record`, and return its lines."""
    if images < _LEAST_IMAGES or rounds < 1:
        raise UserError(f"--images {images} --rounds {rounds}: at least {_LEAST_IMAGES} images and 1 round are needed")
    cores = len(os.sched_getaffinity(0))
    photographs = read_photographs(source)
    lines = list(_header(photographs, images=images, rounds=rounds))
    with tempfile.TemporaryDirectory(prefix="shardvit-bench-") as folder:
        work = Work(Path(folder))
        print(f"preparing {images:,} images from {len(photographs.contents):,}", flush=True)
        prepare_remote(photographs, work, images=images)
        for place in places:
            if place == "local":
                scaling = measure_threads(
                    str(work.shards),
                    work.root,
                    threads=threads or (1, 2),
                    images=images,
                    rounds=rounds,
                    cores=cores,
                    beyond_cores=beyond_cores,
                )
                copied = copy_bytes_per_second(cores)
                lines += scaling_lines(scaling, file_bytes=photographs.mean_bytes, copied_bytes_per_second=copied)
                continue
            kind = cast(StoreKind, place)
            numbers, left_out = split_threads(threads or (WORKERS,), cores=cores, beyond_cores=beyond_cores)
            for workers in numbers if threads else (WORKERS,):
                found, skipped = measure_remote(
                    work, kind, images=images, rounds=rounds, workers=workers, delays_ms=delays_ms, readers=readers
                )
                lines += ["", f"{kind}, {workers} workers", *remote_lines(kind, found, skipped)]
            lines += [f"not run: {number} workers on {cores} cores" for number in left_out]
    print("\n" + "\n".join(lines))
    if record is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return lines


def _header(photographs: Photographs, *, images: int, rounds: int) -> Iterator[str]:
    yield heading("torch", "fsspec", "aiohttp", "s3fs", "webdataset")
    yield f"load average at the start: {os.getloadavg()[0]:.1f}"
    yield (
        f"{images:,} images in 8 shards: {len(photographs.contents)} photographs of {photographs.mean_bytes / 1000:.0f}"
        f" kB and {photographs.mean_megapixels:.2f} megapixels on average, repeated; {rounds} rounds"
    )

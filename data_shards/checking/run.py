"""Scan all parts of all shards of a set, with one process per core.

Processes, not threads: on small images most of the time is Python, and a decoder that crashes ends one process instead
of the check, which then finds out which shard it was.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from data_shards.checking.scan import PartScan, ScanRequest, ShardPart, scan_part
from data_shards.processes import deaf_to_interrupts, num_cores
from data_shards.progress_line import Progress

# A process takes 0.3 s to start, so with less work than this none is started.
_LITTLE_SECONDS = 0.5
_SECONDS_PER_SAMPLE, _SECONDS_PER_BYTE = 22e-6, 1e-9  # measured: headers, label, hashes; SHA-256 twice
_PARTS_PER_PROCESS = 4  # so that the processes end at nearly the same time, also where there are few shards

_request: ScanRequest | None = None  # of this worker process


def scan_set(request: ScanRequest, *, processes: int | None, report: Callable[[str], None]) -> list[PartScan]:
    """All parts of all shards, in order; `processes` None: one per core, or none for a small set."""
    shards = request.shards
    if processes is None:
        seconds = shards.num_samples * _SECONDS_PER_SAMPLE + (shards.num_bytes or 0) * _SECONDS_PER_BYTE
        processes = num_cores() if request.decode or seconds >= _LITTLE_SECONDS else 1
    num_parts = max(1, _PARTS_PER_PROCESS * processes // max(1, len(shards.shards))) if processes > 1 else 1
    parts = [ShardPart(shard, number, num_parts) for shard in range(len(shards.shards)) for number in range(num_parts)]
    scans: dict[ShardPart, PartScan] = {}
    with Progress(shards.num_samples, report, doing=f"checking {shards.split or shards.name}") as progress:
        can_start = processes > 1 and len(parts) > 1
        if can_start:
            scans |= _scan_in_pool(request, parts, processes=processes, progress=progress)
            # After a crash of a decoder or out of memory: one process per part shows which part it was.
            can_start = len(scans) < len(parts) and _can_start_processes(request)
        for part in parts:
            if part not in scans and can_start:
                alone = _scan_in_pool(request, [part], processes=1, progress=progress)
                scans[part] = alone.get(part) or _crashed(part)
            elif part not in scans:
                scans[part] = scan_part(request, part)
                progress.add(len(scans[part].samples))
    return [scans[part] for part in parts]


def _scan_in_pool(
    request: ScanRequest, parts: Sequence[ShardPart], *, processes: int, progress: Progress
) -> dict[ShardPart, PartScan]:
    scans: dict[ShardPart, PartScan] = {}
    pool = _pool(request, processes=min(processes, len(parts)))
    try:
        with deaf_to_interrupts():
            futures = {pool.submit(_scan_in_worker, part): part for part in parts}
        for future in as_completed(futures):
            scans[futures.pop(future)] = future.result()
            progress.add(len(future.result().samples))
    except BrokenProcessPool:
        pass
    finally:
        pool.shutdown(cancel_futures=True)
    return scans


def _can_start_processes(request: ScanRequest) -> bool:
    """False for a program that is read from standard input."""
    try:
        with deaf_to_interrupts(), _pool(request, processes=1) as pool:
            return pool.submit(os.getpid).result() > 0
    except BrokenProcessPool:
        return False


def _pool(request: ScanRequest, *, processes: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")  # Spawned: a fork copies locks of other threads.
    return ProcessPoolExecutor(processes, mp_context=context, initializer=_begin_worker, initargs=(request,))


def _begin_worker(request: ScanRequest) -> None:
    global _request
    _request = request
    # libjpeg writes about damage here without naming the image; the findings do.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _scan_in_worker(part: ShardPart) -> PartScan:
    assert _request is not None
    return scan_part(_request, part)


def _crashed(part: ShardPart) -> PartScan:
    scan = PartScan(part)
    scan.add_fault("crashed-check", f"part {part.number + 1} of {part.parts} of its samples" if part.parts > 1 else "")
    return scan

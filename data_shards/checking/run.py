"""All parts of all shards of a set, scanned by processes of their own, as many as there are cores.

Processes, not threads: on small images most of the time is Python, and a decoder that crashes ends one process instead
of the check, which then finds out which shard it was.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from data_shards.checking.scan import Part, PartScan, ScanRequest, scan_part
from data_shards.processes import deaf_to_interrupts, num_cores
from data_shards.progress_line import Progress

# Of work that is done without processes, each of which takes 0.3 s to start.
_LITTLE_SECONDS = 0.5
_SECONDS_PER_SAMPLE, _SECONDS_PER_BYTE = 22e-6, 1e-9  # measured: headers, label, hashes; SHA-256 twice
_PARTS_PER_PROCESS = 4  # so that the processes end at nearly the same time, also where there are few shards

_request: ScanRequest | None = None  # of this worker process


def _begin_worker(request: ScanRequest) -> None:
    global _request
    _request = request
    # libjpeg tells of damage here, without saying in which image: the findings do.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _scan_in_worker(part: Part) -> PartScan:
    assert _request is not None
    return scan_part(_request, part)


def scan_set(request: ScanRequest, *, processes: int | None, report: Callable[[str], None]) -> list[PartScan]:
    """All parts of all shards, in their order.

    Args:
        request: what to look at, and how closely.
        processes: None: as many as cores, or this one alone where the set is small.
        report: takes lines on the progress.
    """
    shards = request.shards
    if processes is None:
        processes = num_cores()
        seconds = shards.num_samples * _SECONDS_PER_SAMPLE + (shards.num_bytes or 0) * _SECONDS_PER_BYTE
        if seconds < _LITTLE_SECONDS and not request.decode:
            processes = 1
    num_parts = max(1, _PARTS_PER_PROCESS * processes // max(1, len(shards.shards))) if processes > 1 else 1
    parts = [Part(shard, number, num_parts) for shard in range(len(shards.shards)) for number in range(num_parts)]
    with Progress(shards.num_samples, report, doing=f"checking {shards.split or shards.name}") as progress:
        if processes == 1 or len(parts) == 1:
            scans = {}
            for part in parts:
                scans[part] = scan_part(request, part)
                progress.add(scans[part].num_samples)
        else:
            scans = _scan_in_pool(request, parts, processes=processes, progress=progress)
            unfinished = [part for part in parts if part not in scans]
            # A decoder has crashed, or memory ran out and the kernel ended the process: alone, each shows which it was.
            has_processes = bool(unfinished) and _has_processes(request)
            for part in unfinished:
                if has_processes:
                    scans |= _scan_in_pool(request, [part], processes=1, progress=progress) or {part: _crashed(part)}
                else:
                    scans[part] = scan_part(request, part)
    return [scans[part] for part in parts]


def _scan_in_pool(
    request: ScanRequest, parts: Sequence[Part], *, processes: int, progress: Progress
) -> dict[Part, PartScan]:
    """What could be scanned before a process died, or all."""
    scans: dict[Part, PartScan] = {}
    pool = _pool(request, processes=min(processes, len(parts)))
    try:
        with deaf_to_interrupts():
            futures = {pool.submit(_scan_in_worker, part): part for part in parts}
        for future in as_completed(futures):
            scans[futures.pop(future)] = future.result()
            progress.add(future.result().num_samples)
    except BrokenProcessPool:
        pass
    finally:
        pool.shutdown(cancel_futures=True)
    return scans


def _pool(request: ScanRequest, *, processes: int) -> ProcessPoolExecutor:
    # Spawned: a fork copies locks of other threads.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, mp_context=context, initializer=_begin_worker, initargs=(request,))


def _has_processes(request: ScanRequest) -> bool:
    """Whether a process can be started at all; not so below a program that comes from standard input."""
    try:
        with deaf_to_interrupts(), _pool(request, processes=1) as pool:
            return pool.submit(os.getpid).result() > 0
    except BrokenProcessPool:
        return False


def _crashed(part: Part) -> PartScan:
    scan = PartScan(part)
    scan.add_fault("crashed-check", f"part {part.number + 1} of {part.parts} of its samples" if part.parts > 1 else "")
    return scan

"""Scan all parts of all shards of a set, with one process per core.

Processes, not threads: on small images most of the time is Python, and a decoder that crashes ends one process instead
of the check, which then finds out which shard it was.
"""

from __future__ import annotations

from collections.abc import Callable

from data_shards.checking.scan import PartScan, ScanRequest, ShardPart, scan_part
from data_shards.processes import num_cores, run_parts
from data_shards.progress_line import Progress

# A process takes 0.3 s to start, so with less work than this none is started.
_LITTLE_SECONDS = 0.5
_SECONDS_PER_SAMPLE, _SECONDS_PER_BYTE = 22e-6, 1e-9  # measured: headers, label, hashes; SHA-256 twice
_PARTS_PER_PROCESS = 4  # so that the processes end at nearly the same time, also where there are few shards


def scan_set(request: ScanRequest, *, processes: int | None, report: Callable[[str], None]) -> list[PartScan]:
    """All parts of all shards, in order; `processes` None: one per core, or none for a small set."""
    shards = request.shards
    if processes is None:
        seconds = shards.num_samples * _SECONDS_PER_SAMPLE + (shards.num_bytes or 0) * _SECONDS_PER_BYTE
        processes = num_cores() if request.decode or seconds >= _LITTLE_SECONDS else 1
    num_parts = max(1, _PARTS_PER_PROCESS * processes // max(1, len(shards.shards))) if processes > 1 else 1
    parts = [ShardPart(shard, number, num_parts) for shard in range(len(shards.shards)) for number in range(num_parts)]
    with Progress(shards.num_samples, report, status=f"checking {shards.split or shards.name}") as progress:
        scans = run_parts(
            scan_part, request, parts, processes=processes, done=lambda scan: progress.add(len(scan.samples))
        )
    return [scans.get(part) or _crashed(part) for part in parts]


def _crashed(part: ShardPart) -> PartScan:
    scan = PartScan(part)
    scan.add_fault("crashed-check", f"part {part.number + 1} of {part.parts} of its samples" if part.parts > 1 else "")
    return scan

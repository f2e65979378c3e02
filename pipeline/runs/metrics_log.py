"""Every logged value, in one text file per stage, RUNS/NAME/STAGE/metrics.jsonl; MLflow, tables and figures read it.

A row: {"step": 400, "images_seen": 25600, "time": 1760000000.5, "metrics": {"train/loss": 0.25}}. Costs one `write` of
a few hundred bytes, see `growing_file` for what survives. What a resumed stage repeats is taken back first.
NaN and Infinity are written as Python's json does, which strict readers refuse.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from data_shards.durable import replaced
from pipeline.runs.growing_file import GrowingFile, lines_from

_MOST = 2**63  # a damaged row's count may have thousands of digits
_LATEST = 2**40  # seconds: in the year 36,812


@dataclass(frozen=True)
class MetricRow:
    """The values logged at one step; `time` in unix seconds, `images_seen` over all ranks."""

    step: int
    images_seen: int
    time: float
    metrics: Mapping[str, float]


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """The open file of one stage, on rank 0; made by `open_metrics_log`."""

    def __init__(self, path: Path, *, resume_step: int, kept_rows: int, dropped_broken_rows: int) -> None:
        self.path = path
        self.resume_step = resume_step
        self.kept_rows = kept_rows
        self.dropped_broken_rows = dropped_broken_rows  # a line torn by kill -9, or a damaged file
        self._file = GrowingFile(path)

    def append(self, *, step: int, images_seen: int, metrics: Mapping[str, float]) -> MetricRow:
        """Write one row with the current time, and return it; OSError if the disk is full."""
        row = MetricRow(
            step=int(step),
            images_seen=int(images_seen),
            time=time.time(),
            metrics={name: float(value) for name, value in metrics.items()},
        )
        # json writes floats by repr, the shortest text that reads back to the same bits.
        self._file.append(json.dumps(dataclasses.asdict(row)).encode())
        return row

    def close(self) -> None:
        """Closing twice is harmless."""
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def open_metrics_log(path: Path, *, resume_step: int) -> MetricsLog:
    """Open `path` for appending, without rows after `resume_step` (-1: empty) and unreadable ones (a torn last line).

    The file is replaced atomically, and only if there is something to drop.
    """
    path.parent.mkdir(exist_ok=True)
    lines = list(_decoded_lines(path))
    # A row that only lost its newline is whole, and gets a new one.
    kept = [line.removesuffix(b"\n") + b"\n" for line, row in lines if row is not None and row.step <= resume_step]
    if kept != [line for line, _ in lines]:
        with replaced(path) as beside:
            beside.write_bytes(b"".join(kept))
    broken = sum(row is None for _, row in lines)
    return MetricsLog(path, resume_step=resume_step, kept_rows=len(kept), dropped_broken_rows=broken)


def read_metrics(path: Path) -> list[MetricRow]:
    """All rows of a file, in order; none if it does not exist. A step may have a training and an evaluation row.

    A torn last line is skipped; a damaged line before it raises ValueError, as silent holes are worse than no curve.
    """
    rows: list[MetricRow] = []
    for number, (line, row) in enumerate(_decoded_lines(path), start=1):
        if row is not None:
            rows.append(row)
        elif line.endswith(b"\n"):
            raise ValueError(f"{path}, line {number} is damaged: remove that line")
    return rows


def iter_metrics(path: Path) -> Iterator[MetricRow]:
    """The readable rows one by one, even while the file is being written; none if it does not exist."""
    return (row for _, row in _decoded_lines(path) if row is not None)


class MetricsFollower:
    """Reads a metrics.jsonl while it grows, and from its start again when a resumed stage has cut it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begin_again()

    def begin_again(self) -> None:
        """Forget what was read."""
        self.count = self.damaged = self._offset = 0  # readable rows, unreadable lines, bytes so far
        self._file: tuple[int, int] | None = None  # device and inode

    def new_rows(self) -> Iterator[MetricRow]:
        """The readable rows after those read so far, up to a last line that is still being written; `count` then
        includes them. OSError as `lines_from`."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return self.begin_again()
        # A resumed stage replaces the file by one without the rows that it will write again.
        if (stat.st_dev, stat.st_ino) != self._file or stat.st_size < self._offset:
            self.begin_again()
            self._file = (stat.st_dev, stat.st_ino)
        for line, row in _decoded_lines(self.path, offset=self._offset):
            if not line.endswith(b"\n"):
                return None
            self._offset += len(line)
            if row is None:
                self.damaged += 1
            else:
                self.count += 1
                yield row


def follow_metrics(path: Path, *, offset: int) -> Iterator[tuple[MetricRow, int]]:
    """The readable rows from a byte on, each with the byte after it, up to a last line that is still being written."""
    for line, row in _decoded_lines(path, offset=offset):
        if not line.endswith(b"\n"):
            return
        offset += len(line)
        if row is not None:
            yield row, offset


def _decoded_lines(path: Path, *, offset: int = 0) -> Iterator[tuple[bytes, MetricRow | None]]:
    return ((line, _decode(line)) for line in lines_from(path, offset=offset))


def _decode(line: bytes) -> MetricRow | None:
    try:
        record = json.loads(line)
        step, images_seen = int(record["step"]), int(record["images_seen"])
        seconds = float(record["time"])
        if not (0 <= step < _MOST and 0 <= images_seen < _MOST and 0 <= seconds < _LATEST):
            return None
        return MetricRow(
            step=step,
            images_seen=images_seen,
            time=seconds,
            metrics={sys.intern(str(name)): float(value) for name, value in record["metrics"].items()},
        )
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError):
        return None

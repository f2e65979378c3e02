"""Append to and read a stage's metrics.jsonl (every logged value) and events.jsonl (starts, checkpoints, ends).

    {"step": 400, "images_seen": 25600, "time": 1760000000.5, "metrics": {"train/loss": 0.25}}
    {"time": 1760000000.5, "step": 400, "images_seen": 25600, "kind": "checkpoint", "text": "..."}

Rank 0 writes each line in one unbuffered `write`, so readers see whole lines and a kill loses nothing. Nothing is
fsynced: a power failure may cost the last seconds. A resumed stage first cuts metrics.jsonl back to its checkpoint.
events.jsonl keeps all attempts, and training continues if it cannot be written. NaN and Infinity are written as by
Python's json, which strict parsers reject.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self, get_args

from shardvit.data_shards.durable import break_links, replaced
from shardvit.data_shards.safe_paths import open_inside

EventKind = Literal[
    "start",  # of an attempt: first step, processes, hosts
    "checkpoint",  # committed
    "evaluation",
    "skipped",  # steps with non-finite gradients
    "spike",  # of the loss
    "rollback",
    "damaged_image",
    "slow_rank",
    "image_size",  # of training, from this step on
    "note",  # any other line printed
    "stopped",  # by a signal, after saving
    "failed",
    "done",
]
EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)
_LONGEST_TEXT = 2000  # characters
_MOST = 2**63  # a damaged count may have thousands of digits
_LATEST = 2**40  # unix seconds, in the year 36,812
_DAMAGED = (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class MetricRow:
    """Values logged at one step; `time` in unix seconds, `images_seen` over all ranks."""

    step: int
    images_seen: int
    time: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Event:
    """A line of events.jsonl; `time` in unix seconds, `step` where training stood or the step concerned."""

    time: float
    step: int
    images_seen: int
    kind: EventKind
    text: str  # may contain file and class names: escape it before display


class _GrowingFile:
    """Append JSON lines; creates the file but not its folder."""

    def __init__(self, path: Path) -> None:
        break_links(path)
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115  (closed by close())
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            self._is_torn = file.read(1) not in (b"", b"\n")

    def write(self, record: Mapping[str, object]) -> None:
        # End a line that a kill or a full disk left half-written.
        line = (b"\n" if self._is_torn else b"") + json.dumps(record).encode() + b"\n"
        self._is_torn = True
        while line:
            line = line[self._file.write(line) :]
        self._is_torn = False

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MetricsLog(_GrowingFile):
    """A stage's metrics.jsonl, open for appending. Opening drops unreadable rows and those after `resume_step` (-1:
    all), by atomic replacement if there are any."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        path.parent.mkdir(exist_ok=True)
        lines = list(_decoded_lines(path))
        # A row that lost only its newline is intact: restore the newline.
        kept = [line.removesuffix(b"\n") + b"\n" for line, row in lines if row is not None and row.step <= resume_step]
        if kept != [line for line, _ in lines]:
            with replaced(path) as beside:
                beside.write_bytes(b"".join(kept))
        self.path, self.kept_rows = path, len(kept)
        self.last_step = max((row.step for _, row in lines if row is not None), default=0)  # before they were cut
        self.dropped_broken_rows = sum(row is None for _, row in lines)  # torn by kill -9, or damaged
        super().__init__(path)

    def append(self, *, step: int, images_seen: int, metrics: Mapping[str, float]) -> MetricRow:
        """Write and return a row with the current time; OSError if the disk is full."""
        values = {name: float(value) for name, value in metrics.items()}
        row = MetricRow(step=int(step), images_seen=int(images_seen), time=time.time(), metrics=values)
        self.write(asdict(row))  # floats by repr, which round-trips exactly
        return row


class EventsLog(AbstractContextManager["EventsLog"]):
    """A stage's events.jsonl on rank 0; thread-safe. A failed write is reported once by `say` and ends recording."""

    def __init__(self, path: Path, *, say: Callable[[str], None] = lambda text: None) -> None:
        self.path = path
        self._say = say
        self._lock = threading.Lock()
        self._file: _GrowingFile | None = None
        try:
            self._file = _GrowingFile(path)
        except OSError as error:
            self._give_up(error)

    def append(self, kind: EventKind, text: str, *, step: int, images_seen: int) -> None:
        event = Event(time.time(), step=int(step), images_seen=int(images_seen), kind=kind, text=text[:_LONGEST_TEXT])
        with self._lock:
            try:
                if self._file is not None:
                    self._file.write(asdict(event))
            except OSError as error:
                self._give_up(error)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self, error: OSError) -> None:
        self.__exit__()
        self._say(f"{self.path} cannot be written ({error.strerror}): events are no longer recorded there")


def read_events(path: Path) -> list[Event]:
    """Read all events in order, also while the file grows; [] if it does not exist. Skips torn and damaged lines."""
    return [event for line in _lines(path) if (event := _event(line)) is not None]


def read_metrics(path: Path) -> list[MetricRow]:
    """Read all rows in order; [] if the file does not exist. A step may have a training and an evaluation row. Skips a
    torn last line. ValueError for an earlier damaged line: a silent gap is worse than no curve."""
    rows: list[MetricRow] = []
    for number, (line, row) in enumerate(_decoded_lines(path), start=1):
        if row is not None:
            rows.append(row)
        elif line.endswith(b"\n"):
            raise ValueError(f"{path}, line {number} is damaged: remove that line")
    return rows


def iter_metrics(path: Path) -> Iterator[MetricRow]:
    """Yield the readable rows, also while the file grows; none if it does not exist."""
    return (row for _, row in _decoded_lines(path) if row is not None)


class MetricsFollower:
    """Read a growing metrics.jsonl; start over when a resumed stage has cut it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start_over()

    def start_over(self) -> None:
        self.count = self.damaged = self._offset = 0  # rows, unreadable lines and bytes read so far
        self._file: tuple[int, int] | None = None  # device and inode

    def new_rows(self) -> Iterator[MetricRow]:
        """Yield the readable rows since the last call, up to a line still being written; adds them to `count`. OSError
        if this is no regular file or a link out of its folder."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return self.start_over()
        # A resumed stage replaces the file to drop the rows it will write again.
        if (stat.st_dev, stat.st_ino) != self._file or stat.st_size < self._offset:
            self.start_over()
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


def _lines(path: Path, *, offset: int = 0) -> Iterator[bytes]:
    """Yield lines from a byte offset, newlines kept; the last may lack one."""
    try:
        file = open_inside(path, folder=path.parent)
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        yield from file


def _decoded_lines(path: Path, *, offset: int = 0) -> Iterator[tuple[bytes, MetricRow | None]]:
    return ((line, _row(line)) for line in _lines(path, offset=offset))


def _row(line: bytes) -> MetricRow | None:
    try:
        record = json.loads(line)
        metrics = {sys.intern(str(name)): float(value) for name, value in record["metrics"].items()}
        return MetricRow(**_position(record), metrics=metrics)
    except _DAMAGED:
        return None


def _event(line: bytes) -> Event | None:
    try:
        record = json.loads(line)
        if record["kind"] in EVENT_KINDS and isinstance(record["text"], str):
            return Event(**_position(record), kind=record["kind"], text=record["text"])
    except _DAMAGED:
        pass
    return None


def _position(record: Any) -> dict[str, Any]:
    step, images_seen, seconds = int(record["step"]), int(record["images_seen"]), float(record["time"])
    if not (0 <= step < _MOST and 0 <= images_seen < _MOST and 0 <= seconds < _LATEST):
        raise ValueError("a damaged count or time")
    return {"step": step, "images_seen": images_seen, "time": seconds}

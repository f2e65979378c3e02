"""The two growing files of a stage: metrics.jsonl (every logged value) and events.jsonl (starts, checkpoints, ends).

    {"step": 400, "images_seen": 25600, "time": 1760000000.5, "metrics": {"train/loss": 0.25}}
    {"time": 1760000000.5, "step": 400, "images_seen": 25600, "kind": "checkpoint", "text": "..."}

Rank 0 writes them, each line in one `write` of a few hundred bytes, so readers see whole lines and a kill loses nothing
that was appended; a power failure may cost the last seconds, as nothing is flushed. A resumed stage first cuts
metrics.jsonl back to its checkpoint; events.jsonl keeps all attempts, and training continues if it cannot be written.
NaN and Infinity are written as Python's json does, which strict readers refuse.
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

from data_shards.durable import break_links, replaced
from data_shards.safe_paths import open_inside

EventKind = Literal[
    "start",  # of an attempt: from which step, on how many processes and hosts
    "checkpoint",  # committed
    "evaluation",
    "skipped",  # steps whose gradients were not finite
    "spike",  # of the loss
    "rollback",
    "damaged_image",
    "slow_rank",
    "note",  # any other line on the screen
    "stopped",  # by a signal, after saving
    "failed",
    "done",
]
EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)
_LONGEST_TEXT = 2000  # characters
_MOST = 2**63  # a damaged line's count may have thousands of digits
_LATEST = 2**40  # seconds: in the year 36,812
_DAMAGED = (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class MetricRow:
    """The values logged at one step; `time` in unix seconds, `images_seen` over all ranks."""

    step: int
    images_seen: int
    time: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Event:
    """`time` in unix seconds; `step` and `images_seen`: where training stood, or the step in question."""

    time: float
    step: int
    images_seen: int
    kind: EventKind
    text: str  # a sentence; may contain names of files and classes, so show it as text


class _GrowingFile:
    """Appends JSON lines; makes the file but not its folder."""

    def __init__(self, path: Path) -> None:
        break_links(path)
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115  (closed by close())
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            self._is_torn = file.read(1) not in (b"", b"\n")

    def write(self, record: Mapping[str, object]) -> None:
        # After a kill, or a disk that was full for a moment, end the half-written line first.
        line = (b"\n" if self._is_torn else b"") + json.dumps(record).encode() + b"\n"
        self._is_torn = True
        while line:
            line = line[self._file.write(line) :]
        self._is_torn = False

    def close(self) -> None:
        """Closing twice is harmless."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MetricsLog(_GrowingFile):
    """A stage's metrics.jsonl, open for appending, without rows after `resume_step` (-1: empty) and unreadable ones.

    The file is replaced atomically, and only if there is something to drop.
    """

    def __init__(self, path: Path, *, resume_step: int) -> None:
        path.parent.mkdir(exist_ok=True)
        lines = list(_decoded_lines(path))
        # A row that only lost its newline is whole, and gets a new one.
        kept = [line.removesuffix(b"\n") + b"\n" for line, row in lines if row is not None and row.step <= resume_step]
        if kept != [line for line, _ in lines]:
            with replaced(path) as beside:
                beside.write_bytes(b"".join(kept))
        self.path, self.kept_rows = path, len(kept)
        self.dropped_broken_rows = sum(row is None for _, row in lines)  # torn by kill -9, or damaged
        super().__init__(path)

    def append(self, *, step: int, images_seen: int, metrics: Mapping[str, float]) -> MetricRow:
        """Write and return one row with the current time; OSError if the disk is full."""
        values = {name: float(value) for name, value in metrics.items()}
        row = MetricRow(step=int(step), images_seen=int(images_seen), time=time.time(), metrics=values)
        self.write(asdict(row))  # floats by repr, the shortest text that reads back to the same bits
        return row


class EventsLog(AbstractContextManager["EventsLog"]):
    """A stage's events.jsonl, on rank 0; thread-safe. `say` reports once that the file cannot be written."""

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
        """Write one event with the current time."""
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
    """Read all events in the order in which they happened, also while the file is written; [] if it does not exist.
    Lines that are no events (torn by a kill, damaged) are left out."""
    return [event for line in _lines(path) if (event := _event(line)) is not None]


def read_metrics(path: Path) -> list[MetricRow]:
    """Read all rows in order; [] if the file does not exist. A step may have a training and an evaluation row.

    Skips a torn last line; raises ValueError for a damaged one before it, as silent holes are worse than no curve.
    """
    rows: list[MetricRow] = []
    for number, (line, row) in enumerate(_decoded_lines(path), start=1):
        if row is not None:
            rows.append(row)
        elif line.endswith(b"\n"):
            raise ValueError(f"{path}, line {number} is damaged: remove that line")
    return rows


def iter_metrics(path: Path) -> Iterator[MetricRow]:
    """Yield the readable rows, also while the file is written; none if it does not exist."""
    return (row for _, row in _decoded_lines(path) if row is not None)


class MetricsFollower:
    """Reads a growing metrics.jsonl, and starts over when a resumed stage has cut it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start_over()

    def start_over(self) -> None:
        self.count = self.damaged = self._offset = 0  # readable rows, unreadable lines, bytes so far
        self._file: tuple[int, int] | None = None  # device and inode

    def new_rows(self) -> Iterator[MetricRow]:
        """Yield the readable rows after those read so far, up to a last line that is still being written; `count` then
        includes them. OSError: no regular file, or a link to another folder's."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return self.start_over()
        # A resumed stage replaces the file by one without the rows that it will write again.
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
    """Yield the lines from a byte on with their ends, which the last one may lack."""
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

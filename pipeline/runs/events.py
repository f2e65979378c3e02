"""Events of a stage over all attempts, STAGE/events.jsonl: starts, checkpoints, evaluations, trouble, ends.

A line: {"time": 1760000000.5, "step": 400, "images_seen": 25600, "kind": "checkpoint", "text": "..."}. Rank 0 writes
it; an event costs one `write` of a few hundred bytes, and there are a few of them a checkpoint. Unlike metrics.jsonl
nothing is taken back when a stage is resumed: steps that were done twice are told twice. An event that cannot be
written is left out and training goes on, as the file is only looked at.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from pipeline.runs.growing_file import GrowingFile, lines_from

EventKind = Literal[
    "start",  # of an attempt: from which step, on how many processes and hosts
    "checkpoint",  # it is committed
    "evaluation",
    "skipped",  # steps whose gradients were not finite
    "spike",  # of the loss
    "rollback",
    "damaged_image",
    "slow_rank",
    "note",  # what else was said on the screen
    "stopped",  # by a signal, after saving
    "failed",
    "done",
]
EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)
_LONGEST_TEXT = 2000  # characters
_MOST = 2**63  # a damaged line's count may have thousands of digits


@dataclass(frozen=True)
class Event:
    """`time` in unix seconds; `step` and `images_seen` where training stood, or the step that is told of."""

    time: float
    step: int
    images_seen: int
    kind: EventKind
    text: str  # a sentence; it may name files and classes, so it is shown as text


class EventsLog(AbstractContextManager["EventsLog"]):
    """The open file of one stage, on rank 0; thread-safe.

    Args:
        say: is told once if the file cannot be written.
    """

    def __init__(self, path: Path, *, say: Callable[[str], None] = lambda text: None) -> None:
        self.path = path
        self._say = say
        self._lock = threading.Lock()
        self._file: GrowingFile | None = None
        try:
            self._file = GrowingFile(path)
        except OSError as error:
            self._give_up(error)

    def append(self, kind: EventKind, text: str, *, step: int, images_seen: int) -> None:
        """Write one event with the current time."""
        event = Event(time.time(), step=int(step), images_seen=int(images_seen), kind=kind, text=text[:_LONGEST_TEXT])
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.append(json.dumps(asdict(event)).encode())
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Closing twice is harmless."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _give_up(self, error: OSError) -> None:
        self.close()
        self._say(f"{self.path} cannot be written ({error.strerror}): what happens is not noted there any more")


def read_events(path: Path) -> list[Event]:
    """All readable events, in the order in which they happened, even while the file is being written; none if it does
    not exist. Lines that are not events (torn by a kill, damaged) are left out."""
    return [event for line in lines_from(path) if (event := _decode(line)) is not None]


def _decode(line: bytes) -> Event | None:
    try:
        record = json.loads(line)
        event = Event(
            time=float(record["time"]),
            step=int(record["step"]),
            images_seen=int(record["images_seen"]),
            kind=record["kind"],
            text=record["text"],
        )
        known = event.kind in EVENT_KINDS and isinstance(event.text, str) and math.isfinite(event.time)
        return event if known and 0 <= event.step < _MOST and 0 <= event.images_seen < _MOST else None
    except (ValueError, OverflowError, KeyError, TypeError, RecursionError):
        return None

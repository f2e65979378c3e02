"""Signs of life: one small file per rank, written by the rank's own watcher and read by the others'.

A file is written in place, always the same number of bytes, so that a reader on a network file system needs no fresh
listing of the folder; one that is torn or from an earlier attempt counts as none. Nothing in it is a time of day: the
writer says how long it has got no further, the reader sees by its own clock whether the sequence number moves.

Cost: 4 KiB a write. No torch here.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pipeline.ranks.living import process_started, this_machine

State = Literal["running", "left", "failed", "ended"]
"""left: in good order; failed: by an exception; ended: it has ended the run because of another rank, and said so."""

_FILE_BYTES = 4096
_LONGEST_DOING, _LONGEST_NOTE = 60, 240  # characters; twelve bytes each at most as JSON


@dataclass(frozen=True)
class Heartbeat:
    """What a rank says of itself."""

    rank: int
    attempt: str  # the same for all ranks that were started together
    host: str
    machine: str  # equal where process numbers mean the same
    pid: int
    started: float  # tells the process from a later one with its number; see `process_started`
    main_thread: int  # its number in a stack dump
    sequence: int  # of this file
    step: int
    turn: int  # how many signs of progress there have been in this step
    doing: str
    idle_seconds: float  # since the last sign of progress
    waiting: bool  # inside a call that waits for other ranks
    state: State = "running"
    note: str = ""  # why it failed, or ended the run

    @property
    def name(self) -> str:
        """The rank for a message."""
        return f"rank {self.rank} (host {self.host}, process {self.pid})"

    @property
    def position(self) -> tuple[int, int]:
        """How far it has got; comparable between ranks."""
        return self.step, self.turn


def heartbeat_file(folder: Path, rank: int) -> Path:
    """Where a rank's heartbeat lies."""
    return folder / f"rank-{rank}.json"


def write_heartbeat(folder: Path, beat: Heartbeat) -> None:
    """Write a rank's file, in place.

    Raises:
        OSError: the disk is full, or the folder is gone.
    """
    content = asdict(beat) | {"doing": beat.doing[:_LONGEST_DOING], "note": beat.note[:_LONGEST_NOTE]}
    line = json.dumps(content).encode().ljust(_FILE_BYTES - 1) + b"\n"
    descriptor = os.open(heartbeat_file(folder, beat.rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, line, 0)
    finally:
        os.close(descriptor)  # on NFS this is what sends it


def read_heartbeat(folder: Path, rank: int, *, attempt: str | None = None) -> Heartbeat | None:
    """A rank's file, if it is whole and, where `attempt` is given, of this attempt."""
    try:
        beat = Heartbeat(**json.loads(heartbeat_file(folder, rank).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return beat if attempt in (None, beat.attempt) else None


def is_gone(beat: Heartbeat) -> bool:
    """Whether the process is known to be dead; never of a process on another machine."""
    return beat.machine == this_machine() and process_started(beat.pid) != beat.started

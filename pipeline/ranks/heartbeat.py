"""Heartbeats: one small file per rank, from which the others learn who hangs. 4 KiB a write; no torch.

Writes go in place at a fixed size, so readers on a network file system need no new listing. A torn file, or one of
another attempt, counts as missing. Files hold no time: readers use their own clock.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from shardvit.data_shards.durable import break_links
from shardvit.data_shards.safe_paths import read_inside
from shardvit.pipeline.ranks.process import process_started, this_machine

State = Literal["running", "left", "failed", "ended"]
"""left: exited cleanly; failed: by an exception; ended: stopped the run because another rank failed."""
Why = Literal["failed", "silent", "behind"]

_FILE_BYTES = 4096
_LONGEST_STATUS, _LONGEST_NOTE = 60, 240  # characters; at most twelve bytes each as JSON


@dataclass(frozen=True)
class Heartbeat:
    """A rank's report about itself."""

    rank: int
    attempt: str  # equal for ranks started together
    host: str
    machine: str  # `this_machine`
    pid: int
    started: float  # `process_started`, to detect a reused PID
    main_thread: int  # its identifier in a stack dump
    sequence: int  # of writes
    step: int
    turn: int  # progress reports within this step
    status: str
    idle_seconds: float  # since the last progress
    waiting: bool  # inside a call that waits for other ranks
    state: State = "running"
    note: str = ""  # why it failed, or ended the run

    @property
    def name(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})"

    @property
    def position(self) -> tuple[int, int]:
        return self.step, self.turn

    @property
    def is_here(self) -> bool:
        return self.machine == this_machine()

    @property
    def is_gone(self) -> bool:
        """True if known to be dead; always False for other machines."""
        return self.is_here and process_started(self.pid) != self.started

    @property
    def is_signalable(self) -> bool:
        return self.state == "running" and self.is_here and not self.is_gone


def heartbeat_file(folder: Path, name: int | Literal["news"]) -> Path:
    """Path of a rank's heartbeat, or of the news for all hosts (`dead_ranks`)."""
    return folder / (f"rank-{name}.json" if name != "news" else "news.json")


def write_heartbeat(folder: Path, beat: Heartbeat, *, to: Literal["its own", "news"] = "its own") -> None:
    """Write a file in place; OSError if the disk is full or the folder is gone."""
    content = asdict(beat) | {"status": beat.status[:_LONGEST_STATUS], "note": beat.note[:_LONGEST_NOTE]}
    line = json.dumps(content).encode().ljust(_FILE_BYTES - 1) + b"\n"
    file = heartbeat_file(folder, "news" if to == "news" else beat.rank)
    break_links(file)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, line, 0)
    finally:
        os.close(descriptor)  # NFS sends it now


def read_heartbeat(folder: Path, name: int | Literal["news"], *, attempt: str | None = None) -> Heartbeat | None:
    """Read a file of STAGE/ranks; None if incomplete or, given `attempt`, of another."""
    try:
        beat = Heartbeat(**json.loads(read_inside(heartbeat_file(folder, name), folder=folder.parent)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return beat if attempt in (None, beat.attempt) else None


class WakingClock:
    """Counts seconds awake: caps gaps between ticks, as after suspend or SIGSTOP, at `most_seconds`."""

    def __init__(self, *, most_seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._most_seconds = most_seconds
        self._monotonic = monotonic
        self._last = monotonic()
        self.now = 0.0

    def tick(self) -> float:
        current = self._monotonic()
        self.now += min(current - self._last, self._most_seconds)
        self._last = current
        return self.now


class Sightings:
    """Each rank's newest heartbeat, and when it last changed by the reader's clock."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Heartbeat, float]] = {}

    def note(self, beat: Heartbeat, *, now: float) -> None:
        known = self._seen.get(beat.rank)
        # Not only the next number: a file may have been torn, or not read for a while.
        changed = known is None or known[0].sequence != beat.sequence
        self._seen[beat.rank] = (beat, now if changed or known is None else known[1])

    def of(self, rank: int) -> Heartbeat | None:
        return self._seen[rank][0] if rank in self._seen else None

    def silent_seconds(self, rank: int, *, now: float) -> float:
        return now - self._seen[rank][1] if rank in self._seen else math.inf

    def idle_seconds(self, rank: int, *, now: float) -> float:
        """Time since its last progress: as reported, plus the report's age."""
        beat = self.of(rank)
        return math.inf if beat is None else beat.idle_seconds + self.silent_seconds(rank, now=now)


@dataclass(frozen=True)
class Suspect:
    """A rank that keeps the others waiting."""

    rank: int
    beat: Heartbeat | None  # None: none in this attempt
    why: Why
    idle_seconds: float


def find_suspects(
    sightings: Sightings, *, ranks: Iterable[int], now: float, hang_seconds: float, slack_seconds: float
) -> list[Suspect]:
    """Find the ranks that block a run; empty while any makes progress. Picks failed ranks, else those with a stale
    heartbeat (stopped or dead), else, of those not waiting for others, the ones furthest behind. `sightings` includes
    the observer; ranks may go `hang_seconds` without progress, and heartbeats be `slack_seconds` old when read."""
    beats = {rank: sightings.of(rank) for rank in ranks}
    inside = {rank: beat for rank, beat in beats.items() if beat is None or beat.state != "left"}
    known = {rank: beat for rank, beat in inside.items() if beat is not None}
    idle = {rank: sightings.idle_seconds(rank, now=now) for rank in inside}
    found: list[int]
    why: Why
    if found := [rank for rank, beat in known.items() if beat.state != "running"]:
        why = "failed"
    elif any(seconds < hang_seconds - slack_seconds for seconds in idle.values()):
        return []
    elif found := [rank for rank in inside if sightings.silent_seconds(rank, now=now) > hang_seconds / 2]:
        why = "silent"
    else:
        working = {rank: beat for rank, beat in known.items() if not beat.waiting} or known
        last = min((beat.position for beat in working.values()), default=None)
        found, why = [rank for rank, beat in working.items() if beat.position == last], "behind"
    return [Suspect(rank, inside[rank], why, idle[rank]) for rank in found]

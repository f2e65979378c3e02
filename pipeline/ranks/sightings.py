"""What one rank knows of the others, and who among them hangs. Pure: heartbeats and a clock go in, names come out.

The clock is the observer's own and counts only seconds in which the observer was awake: a machine that was suspended,
processes that were all stopped and continued, and a time of day that is set anew look like no time at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from pipeline.ranks.heartbeat import Heartbeat


class WakingClock:
    """Seconds in which its owner was awake, as told by calls of `tick`.

    Args:
        most_seconds: what a longer time between two calls counts as.
        monotonic: the clock behind it, in seconds.
    """

    def __init__(self, *, most_seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._most_seconds = most_seconds
        self._monotonic = monotonic
        self._last = monotonic()
        self.now = 0.0

    def tick(self) -> float:
        """Take in the time since the last call; the new `now`."""
        current = self._monotonic()
        self.now += min(current - self._last, self._most_seconds)
        self._last = current
        return self.now


class Sightings:
    """The newest heartbeat of each rank that was seen, and when it was seen to change."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Heartbeat, float]] = {}

    def note(self, beat: Heartbeat, *, now: float) -> None:
        """A rank's heartbeat has been read."""
        known = self._seen.get(beat.rank)
        # Not only a larger number: a rank's file may be torn, or come back after a while in which it was not looked at.
        changed = known is None or known[0].sequence != beat.sequence
        self._seen[beat.rank] = (beat, now if changed or known is None else known[1])

    def of(self, rank: int) -> Heartbeat | None:
        """The newest heartbeat of a rank."""
        return self._seen[rank][0] if rank in self._seen else None

    def silent_seconds(self, rank: int, *, now: float) -> float:
        """Since its heartbeat was last seen to change; infinite if there never was one."""
        return now - self._seen[rank][1] if rank in self._seen else math.inf

    def idle_seconds(self, rank: int, *, now: float) -> float:
        """Since its last sign of progress: what it said itself, and how long ago it said so."""
        beat = self.of(rank)
        return math.inf if beat is None else beat.idle_seconds + self.silent_seconds(rank, now=now)


@dataclass(frozen=True)
class Suspect:
    """A rank that keeps the others waiting."""

    rank: int
    beat: Heartbeat | None  # None: it has not been heard of in this attempt
    why: Literal["failed", "silent", "behind"]
    idle_seconds: float


def find_suspects(
    sightings: Sightings, *, ranks: Iterable[int], now: float, hang_seconds: float, slack_seconds: float
) -> list[Suspect]:
    """Who keeps a run from going on; empty as long as any rank goes on.

    In this order: ranks that have failed; those that are silent, because they are stopped or gone; those that do not
    wait for others, and of these the ones that have got least far.

    Args:
        sightings: of all ranks, the observer's own included.
        ranks: all of them.
        now: on the clock of the sightings.
        hang_seconds: how long a rank may go without progress.
        slack_seconds: how far behind the truth a heartbeat may be.
    """
    inside = [rank for rank in ranks if (beat := sightings.of(rank)) is None or beat.state != "left"]
    failed = [rank for rank in inside if (beat := sightings.of(rank)) is not None and beat.state != "running"]
    idle = {rank: sightings.idle_seconds(rank, now=now) for rank in inside}
    if not failed and any(seconds < hang_seconds - slack_seconds for seconds in idle.values()):
        return []
    silent = [rank for rank in inside if sightings.silent_seconds(rank, now=now) > hang_seconds / 2]
    beats = {rank: beat for rank in inside if (beat := sightings.of(rank)) is not None}
    working = [rank for rank, beat in beats.items() if not beat.waiting] or list(beats)
    last = min((beats[rank].position for rank in working), default=(0, 0))
    behind = [rank for rank in working if beats[rank].position == last]
    why: Literal["failed", "silent", "behind"] = "failed" if failed else "silent" if silent else "behind"
    return [
        Suspect(rank=rank, beat=beats.get(rank), why=why, idle_seconds=idle[rank])
        for rank in {"failed": failed, "silent": silent, "behind": behind}[why]
    ]

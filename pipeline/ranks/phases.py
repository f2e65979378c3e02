"""Phases of a step: `with phases("forward", step=...)` feeds the heartbeat, the pace, the times and the start clock.

Cost: two reads of the clock, and on a GPU two events per forward pass (see `pace`). Nothing waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from pipeline.ranks.group import Ranks
from pipeline.ranks.pace import ASIDE, Pace, Slowest
from pipeline.ranks.start_clock import StartClock
from pipeline.ranks.watch import Watch

Phase = Literal["reading", "forward", "backward", "step", "evaluating", "saving"]
_STATUS: dict[Phase, str] = {  # as a rank that hangs is described
    "reading": "reading a batch",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "step": "the optimizer's step",
    "evaluating": "evaluation",
    "saving": "saving a checkpoint",
}


class Phases:
    """Report one rank's training phases to the watch (heartbeats), the pace, and `start` until the first step.

    Attributes:
        pace: compares the ranks.
        aside_seconds: spent so far on evaluations and checkpoints.
    """

    def __init__(self, *, watch: Watch, pace: Pace, start: StartClock | None = None) -> None:
        self._watch = watch
        self.pace = pace
        self._start = start
        self._seconds: dict[Phase, float] = dict.fromkeys(_STATUS, 0.0)
        self.aside_seconds = 0.0

    @contextmanager
    def __call__(self, name: Phase, *, step: int) -> Iterator[None]:
        self._watch.progress(step, status=_STATUS[name])
        if self._start is not None:
            self._start.set_status(_STATUS[name])
        begin = time.perf_counter()
        with self.pace.measuring(name):
            yield
        seconds = time.perf_counter() - begin
        self._seconds[name] += seconds
        if name in ASIDE:
            self.aside_seconds += seconds
        if self._start is not None and name == "step":
            self._start, start = None, self._start
            start.first_step_done()

    def take_seconds(self) -> dict[Phase, float]:
        taken, self._seconds = self._seconds, dict.fromkeys(_STATUS, 0.0)
        return taken

    def slowest(self, ranks: Ranks) -> Slowest | None:
        """The slowest rank since the last call, see `Pace.compare`; collective."""
        return self.pace.compare(ranks)

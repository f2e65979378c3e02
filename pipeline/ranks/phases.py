"""Time the phases of a step: `with phases("forward", step=...)` feeds heartbeat, times, start clock and comparison.

A rank's own part of a step is reading a batch and the forward pass; whole steps tell nothing, as all wait for the
slowest. On a GPU two events time the forward pass, read only when the ranks compare (four numbers each). Under ZeRO 3
it waits for the others' weights, so only reading counts; under ZeRO 1 and 2 it has the rest of gathering weights, the
same for all, as all began to gather when the step's norm was known. Excluded: the first step, the step after an
evaluation or save, and steps during a background save. A rank whose pictures are being drawn is excused.
"""

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.ranks.slow_rank import Slowest, SlowRanks
from shardvit.pipeline.ranks.start_clock import StartClock
from shardvit.pipeline.ranks.watch import Watch

Phase = Literal["reading", "forward", "backward", "step", "evaluating", "saving"]
_STATUS: dict[Phase, str] = {  # to describe a hanging rank
    "reading": "reading a batch",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "step": "the optimizer's step",
    "evaluating": "evaluation",
    "saving": "saving a checkpoint",
}
_ASIDE = ("evaluating", "saving")  # not training steps
_MOST_EVENTS = 1000  # pairs kept between comparisons; the first stand for the rest


class Phases:
    """Times one rank's phases, and compares the ranks (`factor`, `least_seconds`: see `slow_rank`). `forward` is
    "shared" if it waits for other ranks; `drawing_seconds` returns the CPU time of this rank's drawing process;
    `aside_seconds` is the time spent on evaluations and checkpoints."""

    def __init__(
        self,
        *,
        watch: Watch,
        device: torch.device,
        factor: float,
        least_seconds: float,
        forward: Literal["own", "shared"] = "own",
        drawing_seconds: Callable[[], float] = lambda: 0.0,
        start: StartClock | None = None,
    ) -> None:
        self.aside_seconds = 0.0
        self._watch, self._start = watch, start
        self._seconds: dict[Phase, float] = dict.fromkeys(_STATUS, 0.0)
        self._own: tuple[Phase, ...] = ("reading", "forward") if forward == "own" else ("reading",)
        self._on_gpu = device.type == "cuda"
        self._factor, self._least_seconds = factor, least_seconds
        self._drawing_seconds, self._drawn = drawing_seconds, 0.0
        self._law: SlowRanks | None = None
        self._counts, self._began = False, 0.0  # the current step, and its start
        self._begin_window()

    @contextmanager
    def __call__(self, name: Phase, *, step: int) -> Iterator[None]:
        self._watch.progress(step, status=_STATUS[name])
        if self._start is not None:
            self._start.set_status(_STATUS[name])
        counts = self._counts and name in self._own
        events = None
        by_events = counts and name == "forward" and self._on_gpu
        if by_events and len(self._events) < _MOST_EVENTS:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True, blocking=True)
            events[0].record()
        begin = time.perf_counter()
        yield
        now = time.perf_counter()
        self._seconds[name] += now - begin
        if events:
            events[1].record()
            self._events.append(events)
        if counts and not by_events:
            self._spans[name].append(now - begin)
        if name in _ASIDE:
            self.aside_seconds += now - begin
        if name == "step" and self._counts:
            self._window_seconds += now - self._began
        if name == "step" or name in _ASIDE:
            self._counts, self._began = name == "step", now
        if self._start is not None and name == "step":
            self._start, start = None, self._start
            start.first_step_done()

    def take_seconds(self) -> dict[Phase, float]:
        """Return and reset the seconds in each phase."""
        taken, self._seconds = self._seconds, dict.fromkeys(_STATUS, 0.0)
        return taken

    def disturbed(self) -> None:
        """Do not count the next step; call on all ranks alike."""
        self._counts = False

    def slowest(self, ranks: Ranks) -> Slowest | None:
        """Find the slowest rank since the last call, alike on all ranks; None if one measured nothing; collective."""
        drawn_before, self._drawn = self._drawn, self._drawing_seconds()
        mine = [self._own_seconds(), len(self._spans["reading"]), self._window_seconds, self._drawn > drawn_before]
        self._begin_window()
        if ranks.place.world_size == 1:
            return None
        if self._law is None:
            hosts = ranks.gather_objects(platform.node())
            self._law = SlowRanks(hosts, factor=self._factor, least_seconds=self._least_seconds)
        own, micro_batches, seconds, draws = ranks.gather(torch.tensor(mine, dtype=torch.float64)).T.tolist()
        excused = [rank for rank, one in enumerate(draws) if one]
        return self._law.look(own, micro_batches=int(min(micro_batches)), seconds=max(seconds), excused=excused)

    def _begin_window(self) -> None:
        self._spans: dict[Phase, list[float]] = {"reading": [], "forward": []}
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._window_seconds = 0.0

    def _own_seconds(self) -> float:
        """Mean seconds a micro-batch; 0 if nothing was measured."""
        if self._events:
            self._events[-1][1].synchronize()
            self._spans["forward"] = [before.elapsed_time(after) / 1000 for before, after in self._events]
        return sum(sum(spans) / max(1, len(spans)) for spans in self._spans.values())

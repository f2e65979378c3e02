"""Slow ranks: each rank's time for its own part of a step (get a batch, forward pass), compared over all ranks.

Whole steps tell nothing, as everyone waits for the slowest. On a GPU the forward pass is timed by events, read only
when the ranks compare. Cost: two events a micro-batch and one exchanged number a comparison. Under ZeRO-3 the forward
pass waits for the others' weights, so only the batches are timed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from pipeline.ranks.group import Ranks

_NOISE_SECONDS = 0.005  # a rank that is slower by less does no harm, whatever the factor
_WINDOWS_IN_A_ROW = 2  # one slow window may be anything
_MOST_EVENTS = 1000  # pairs kept between two comparisons; the first ones stand for the rest


@dataclass(frozen=True)
class Slowest:
    """The slowest rank between two comparisons."""

    rank: int
    host: str
    seconds: float  # its own, per micro-batch
    usual_seconds: float  # the median rank's
    ratio: float  # of the two
    windows: int  # in a row in which this rank was slow; 0: it is not
    is_news: bool  # slow for long enough to be told, and not told yet

    def describe(self) -> str:
        return (
            f"rank {self.rank} (host {self.host}) is slow: it takes {self.seconds:.3f} s for its own part of a "
            f"micro-batch (reading, forward pass), {self.ratio:.1f} times the median rank's {self.usual_seconds:.3f} s"
        )


class Pace:
    """Measures this rank, and compares all.

    Args:
        device: where the forward pass runs.
        factor: a rank is slow at this many times the median rank's time, if by more than 5 ms.
        forward: False if the forward pass waits for other ranks.
    """

    def __init__(
        self, *, host: str, device: torch.device, factor: float, forward: Literal["own", "shared"] = "own"
    ) -> None:
        self._forward = forward
        self._host = host
        self._on_gpu = device.type == "cuda"
        self._factor = factor
        self._hosts: list[str] = []
        self._windows: list[int] = []
        self._told: set[int] = set()
        self._begin_window()

    @contextmanager
    def measuring(self, phase: str) -> Iterator[None]:
        """Counts the time in here, if this rank waits for no other in this phase."""
        own = phase == "reading" or (phase == "forward" and self._forward == "own")
        if not own or ((on_gpu := phase == "forward" and self._on_gpu) and len(self._events) >= _MOST_EVENTS):
            yield
        elif on_gpu:
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            yield
            after.record()
            self._events.append((before, after))
        else:
            start = time.perf_counter()
            yield
            self._spans[phase].append(time.perf_counter() - start)

    def compare(self, ranks: Ranks) -> Slowest | None:
        """The slowest rank since the last call, the same on all ranks; collective. None for a single process, or if
        some rank has measured nothing."""
        mine = self._own_seconds()
        self._begin_window()
        if ranks.place.world_size == 1:
            return None
        if not self._hosts:
            self._hosts = [str(host) for host in ranks.gather_objects(self._host)]
            self._windows = [0] * len(self._hosts)
        seconds = ranks.gather(torch.tensor([mine], dtype=torch.float64)).flatten().tolist()
        return self._judge(seconds) if min(seconds) > 0 else None

    def _judge(self, seconds: list[float]) -> Slowest:
        usual = sorted(seconds)[(len(seconds) - 1) // 2]  # of two ranks the faster: the slow one must not hide itself
        for rank, own in enumerate(seconds):
            slow = own > self._factor * usual and own - usual > _NOISE_SECONDS
            self._windows[rank] = self._windows[rank] + 1 if slow else 0
            if not slow:
                self._told.discard(rank)
        # The slowest of the slow ranks that have not been reported yet.
        due = [r for r, n in enumerate(self._windows) if n >= _WINDOWS_IN_A_ROW and r not in self._told]
        slowest = max(due or range(len(seconds)), key=lambda rank: seconds[rank])
        self._told.update(due and [slowest])
        return Slowest(
            rank=slowest,
            host=self._hosts[slowest],
            seconds=seconds[slowest],
            usual_seconds=usual,
            ratio=seconds[slowest] / usual,
            windows=self._windows[slowest],
            is_news=bool(due),
        )

    def _begin_window(self) -> None:
        self._spans: dict[str, list[float]] = {"reading": [], "forward": []}
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def _own_seconds(self) -> float:
        """The mean of a micro-batch; 0 if nothing was measured."""
        if self._events:
            self._events[-1][1].synchronize()
            self._spans["forward"] = [before.elapsed_time(after) / 1000 for before, after in self._events]
        return sum(sum(spans) / max(1, len(spans)) for spans in self._spans.values())

"""Each rank's time for its own part of a step (get a batch, forward pass), compared over all ranks by `slow_rank`.

Whole steps tell nothing, as everyone waits for the slowest. On a GPU the forward pass is timed by events, read only
when the ranks compare. Cost: two events a micro-batch and four exchanged numbers a comparison. Under ZeRO-3 the forward
pass waits for the others' weights, so only the batches are timed. The first step, the step after an evaluation or a
save, and those beside which a checkpoint is written do not count; the rank that has pictures drawn beside it is excused
meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from pipeline.ranks.group import Ranks

_WINDOWS, _SHARE = 4, 0.1
_STOP_WINDOWS, _STOP_TIMES = 8, 10


@dataclass(frozen=True)
class Slowest:
    """The slowest rank of a window; of several slow ones the slowest that was not told yet."""

    rank: int
    host: str
    seconds: float  # its own, per micro-batch
    usual_seconds: float  # the median rank's
    waited_seconds: float  # by the others, in the windows in a row in which it lagged
    waited_share: float  # of these
    is_news: bool  # it is slow, and that was not told yet
    may_stop: bool  # it is so slow, for so long, that a run may end for it

    @property
    def ratio(self) -> float:
        return self.seconds / self.usual_seconds

    def describe(self) -> str:
        return (
            f"rank {self.rank} (host {self.host}) is slow: it takes {self.seconds:.3f} s for its own part of a "
            f"micro-batch (reading, forward pass), {self.ratio:.1f} times the median of {self.usual_seconds:.3f} s, "
            f"and the others have waited {self.waited_seconds:.1f} s for it, {self.waited_share:.0%} of their time"
        )


class SlowRanks:
    """Decides over the windows of a run which rank is slow; `hosts`: each rank's."""

    def __init__(self, hosts: Sequence[str], *, factor: float, least_seconds: float) -> None:
        self._hosts, self._factor, self._least_seconds = hosts, factor, least_seconds
        self._rows: dict[int, list[tuple[float, float]]] = {}  # of ranks that lag, by window: seconds waited, and all
        self._told: set[int] = set()

    def look(
        self, own_seconds: Sequence[float], *, micro_batches: int, seconds: float, excused: Collection[int] = ()
    ) -> Slowest | None:
        """Add a window of `micro_batches` per rank whose steps took `seconds`. `own_seconds`: each rank's per
        micro-batch; 0: not measured, so returns None. `excused` ranks were slowed by other work."""
        if min(own_seconds) <= 0:
            return None
        usual = sorted(own_seconds)[(len(own_seconds) - 1) // 2]  # of two ranks the faster: the slow one must not hide
        for rank, own in enumerate(own_seconds):
            if own > self._factor * usual and rank not in excused:
                self._rows.setdefault(rank, []).append(((own - usual) * micro_batches, seconds))
            elif rank not in excused:
                self._rows.pop(rank, None)
                self._told.discard(rank)
        news = {rank for rank in self._rows if self._lasts(rank, windows=_WINDOWS, times=1)} - self._told
        stopping = {rank for rank in self._rows if self._lasts(rank, windows=_STOP_WINDOWS, times=_STOP_TIMES)}
        slowest = max(news or stopping or range(len(own_seconds)), key=lambda rank: own_seconds[rank])
        self._told |= news & {slowest}
        waited, spent = map(sum, zip(*self._rows.get(slowest, [(0.0, seconds)]), strict=True))
        return Slowest(
            *(slowest, self._hosts[slowest], own_seconds[slowest], usual, waited, waited / max(spent, 1e-9)),
            is_news=slowest in news,
            may_stop=slowest in stopping,
        )

    def _lasts(self, rank: int, *, windows: int, times: int) -> bool:
        waited, spent = map(sum, zip(*self._rows[rank], strict=True))
        return len(self._rows[rank]) >= windows and waited >= max(times * self._least_seconds, _SHARE * spent)


ASIDE = ("evaluating", "saving")  # phases that are no training step
_MOST_EVENTS = 1000  # pairs kept between two comparisons; the first ones stand for the rest


class Pace:
    """Measures this rank, and compares all.

    Args:
        device: where the forward pass runs.
        factor, least_seconds: see `slow_rank`.
        forward: "shared" if the forward pass waits for other ranks.
        drawing_seconds: of CPU, that drawing beside this rank has taken so far.
    """

    def __init__(
        self,
        *,
        host: str,
        device: torch.device,
        factor: float,
        least_seconds: float,
        forward: Literal["own", "shared"] = "own",
        drawing_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._forward = forward
        self._host = host
        self._on_gpu = device.type == "cuda"
        self._factor, self._least_seconds = factor, least_seconds
        self._drawing_seconds, self._drawn = drawing_seconds, 0.0
        self._law: SlowRanks | None = None
        self._counts, self._began = False, 0.0  # the present step, and when it began
        self._begin_window()

    @contextmanager
    def measuring(self, phase: str) -> Iterator[None]:
        """Time the block if the step counts and this rank waits for no other in this phase."""
        own = self._counts and (phase == "reading" or (phase == "forward" and self._forward == "own"))
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
        if phase == "step" or phase in ASIDE:
            now = time.perf_counter()
            if phase == "step" and self._counts:
                self._seconds += now - self._began
            self._counts, self._began = phase == "step", now

    def disturbed(self) -> None:
        """Do not count the next step; call on all ranks alike."""
        self._counts = False

    def compare(self, ranks: Ranks) -> Slowest | None:
        """The slowest rank since the last call, alike on all ranks, None if some rank measured nothing; collective."""
        drawn_before, self._drawn = self._drawn, self._drawing_seconds()
        mine = [self._own_seconds(), len(self._spans["reading"]), self._seconds, self._drawn > drawn_before]
        self._begin_window()
        if ranks.place.world_size == 1:
            return None
        if self._law is None:
            hosts = [str(host) for host in ranks.gather_objects(self._host)]
            self._law = SlowRanks(hosts, factor=self._factor, least_seconds=self._least_seconds)
        own, micro_batches, seconds, draws = ranks.gather(torch.tensor(mine, dtype=torch.float64)).T.tolist()
        excused = [rank for rank, one in enumerate(draws) if one]
        return self._law.look(own, micro_batches=int(min(micro_batches)), seconds=max(seconds), excused=excused)

    def _begin_window(self) -> None:
        self._spans: dict[str, list[float]] = {"reading": [], "forward": []}
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    def _own_seconds(self) -> float:
        """Mean seconds of a micro-batch; 0 if nothing was measured."""
        if self._events:
            self._events[-1][1].synchronize()
            self._spans["forward"] = [before.elapsed_time(after) / 1000 for before, after in self._events]
        return sum(sum(spans) / max(1, len(spans)) for spans in self._spans.values())

"""Decide which rank is slow from each rank's own time per micro-batch, window by window. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

_WINDOWS, _SHARE = 4, 0.1  # consecutive windows, and share of their time waited, before naming a rank
_STOP_WINDOWS, _STOP_TIMES = 8, 10  # windows, and multiples of `slow_rank_seconds` waited, before ending a run


@dataclass(frozen=True)
class Slowest:
    """The slowest rank of a window, preferring slow ones not named yet."""

    rank: int
    host: str
    seconds: float  # its own, per micro-batch
    usual_seconds: float  # the median rank's
    waited_seconds: float  # by the others, over its consecutive lagging windows
    waited_share: float  # of those windows
    is_news: bool  # slow, and not named yet
    may_stop: bool  # slow enough, for long enough, to end the run

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
    """Tracks slow ranks over a run's windows; `hosts`: each rank's."""

    def __init__(self, hosts: Sequence[str], *, factor: float, least_seconds: float) -> None:
        self._hosts, self._factor, self._least_seconds = hosts, factor, least_seconds
        # By lagging rank, a row per window: seconds waited, seconds in all.
        self._rows: dict[int, list[tuple[float, float]]] = {}
        self._told: set[int] = set()

    def look(
        self, own_seconds: Sequence[float], *, micro_batches: int, seconds: float, excused: Collection[int] = ()
    ) -> Slowest | None:
        """Add a window of `micro_batches` per rank whose steps took `seconds`. `own_seconds`: each rank's per
        micro-batch; None if one is 0 (not measured). Ignores `excused` ranks, slowed by other work."""
        if min(own_seconds) <= 0:
            return None
        usual = sorted(own_seconds)[(len(own_seconds) - 1) // 2]  # of two ranks the faster, so the slow one shows
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

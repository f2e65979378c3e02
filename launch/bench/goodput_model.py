"""Forecast the share of wall time that trains, from what saves and failures cost. Pure arithmetic.

Failures come at random, on average every T seconds, also during a restart (exponential, as in Young, CACM 17(9), 1974,
and Daly, FGCS 22(3), 2006). Training saves after every t seconds of steps and stands still for s; a save counts once it
is committed, c seconds after its step; a failure costs r seconds until the first step again. Then

    goodput = t exp(-(r + c - s) / T) / (T (exp((t + s) / T) - 1))

which for a blocking save, c = s, is Daly's complete model, and for costs far below T

    1 - s / t - (t / 2 + c - s / 2 + r) / T

so each second of r or c, and two of t, cost 1 / T: 0.028 % at a failure an hour. Young's interval is sqrt(2 s T). It is
exact: an attempt keeps k saves if it lives for k (t + s) - s + c, so t sum exp(-(k (t + s) - s + c) / T) seconds of
steps on average, and with the restarts that fail takes T exp(r / T). Started as a part of `goodput`;
tests/launch/bench/test_goodput.py compares it with simulated failures.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Saves:
    """What saving costs, in seconds."""

    interval: float  # of steps between saves
    stall: float  # training stands still
    commit: float  # from the saved step until the checkpoint counts

    def __post_init__(self) -> None:
        if not 0 <= self.commit <= self.interval + self.stall:
            raise ValueError(f"a save every {self.interval:g} s cannot take {self.commit:g} s: the next waits for it")


def goodput(saves: Saves, *, restart_seconds: float, failure_seconds: float) -> float:
    """Share of the time that trains; `restart_seconds`: from a failure to the first step; `failure_seconds`: mean time
    between failures."""
    lost = math.exp(-(restart_seconds + saves.commit - saves.stall) / failure_seconds)
    return saves.interval * lost / (failure_seconds * math.expm1((saves.interval + saves.stall) / failure_seconds))


def first_order(saves: Saves, *, restart_seconds: float, failure_seconds: float) -> float:
    """The same, for costs far below `failure_seconds`."""
    lost = saves.interval / 2 + saves.commit - saves.stall / 2 + restart_seconds
    return 1 - saves.stall / saves.interval - lost / failure_seconds


def youngs_interval(*, stall: float, failure_seconds: float) -> float:
    """The interval with the highest goodput, to first order."""
    return math.sqrt(2 * stall * failure_seconds)


def most_restart_seconds(saves: Saves, *, goal: float, failure_seconds: float) -> float:
    """The longest restart with which goodput reaches `goal`; negative: none."""
    free = goodput(saves, restart_seconds=0.0, failure_seconds=failure_seconds)
    return failure_seconds * math.log(free / goal)

"""Which checkpoints are kept and which go. Pure: steps and metrics in, steps out.

Kept are the last few, one of every so many steps for good, and the best one by a metric of the held-out set. The
newest is always kept, whatever else holds. Nothing here looks at files; `checkpoint` does the removing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """What is kept beside the newest checkpoint."""

    last: int  # the newest that many, at least 1
    every_steps: int = 0  # the first in each stretch of that many steps is kept for good; 0: none
    best: str | None = None  # the best by this metric of the evaluation, such as "val/loss"; None: none


@dataclass(frozen=True)
class Kept:
    """A committed checkpoint, as far as its fate depends on it."""

    step: int
    metric: float | None  # of an evaluation at this very step; None: there was none


def superfluous(checkpoints: Iterable[Kept], *, retention: Retention) -> list[int]:
    """The steps of the checkpoints that may go, oldest first.

    A stretch begins at each multiple of `every_steps` and the first checkpoint in it stays: at the multiple itself
    where one was saved there, else the next after it. What precedes the first multiple is not kept for good.
    """
    there = sorted(checkpoints, key=lambda each: each.step)
    keep = {each.step for each in there[-max(retention.last, 1) :]}
    if retention.every_steps:
        first: dict[int, int] = {}
        for each in there:
            first.setdefault(each.step // retention.every_steps, each.step)
        keep |= {step for stretch, step in first.items() if stretch > 0}
    if retention.best is not None:
        known = [each for each in there if each.metric is not None and not math.isnan(each.metric)]
        if known:
            sign = -1.0 if retention.best.endswith("loss") else 1.0
            keep.add(max(known, key=lambda each: (sign * (each.metric or 0.0), each.step)).step)
    return [each.step for each in there if each.step not in keep]

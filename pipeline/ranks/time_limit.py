"""A job's time limit: until when this attempt may run, and how many more jobs a stage will take. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class TimeLimit:
    """Of the job that this process runs in."""

    ends_at: float  # unix seconds
    seconds: float  # of one job; more than zero


def requeues_needed(eta_seconds: float, *, left_seconds: float, limit_seconds: float) -> int:
    """How often a job of `limit_seconds`, of which so many are left, is started again until what takes `eta_seconds`
    is done; 0: it is done before. Start-up and saving at each end are not counted."""
    return math.ceil(max(0.0, eta_seconds - max(0.0, left_seconds)) / limit_seconds)

"""Starts `probe` and gathers what came of each part, whatever a library does to the process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.doctor.child import Answer, run_children

LIMIT_SECONDS = 120.0  # of a child; imports from a busy network disk have taken a minute
PROBE = (sys.executable, "-m", "launch.doctor.probe")


@dataclass(frozen=True)
class Tried:
    """What came of one part: the facts that `probe` describes, or why there are none."""

    facts: Mapping[str, Any] | None = None
    failure: str = ""


def try_parts(
    parts: Sequence[str],
    *,
    environment: Mapping[str, str],
    command: Sequence[str] = PROBE,
    limit_seconds: float = LIMIT_SECONDS,
) -> dict[str, Tried]:
    """Every part's outcome. A part that kills or stops the child is its own finding; the others get a new child."""
    tried: dict[str, Tried] = {}
    left = list(parts)
    while left:
        [answer] = run_children([[*command, *left]], environments=[environment], limit_seconds=limit_seconds)
        outcome = _outcomes(answer)
        if not outcome:  # not one part began, so none of the others would
            return tried | {part: Tried(failure=answer.ending) for part in left}
        tried |= outcome
        left = [part for part in left if part not in tried]
    return tried


def _outcomes(answer: Answer) -> dict[str, Tried]:
    outcomes: dict[str, Tried] = {}
    under_way = ""
    for message in answer.messages:
        if "begin" in message:
            under_way = message["begin"]
        elif "error" in message:
            outcomes[message["part"]] = Tried(failure=message["error"])
        else:
            outcomes[message["part"]] = Tried(facts=message["facts"])
    if under_way and under_way not in outcomes:
        outcomes[under_way] = Tried(failure=answer.ending)
    return outcomes

"""The side of a training batch's images as a function of the step alone, where it grows during a stage."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SizePhase:
    """Steps from `first_step` on, until the next phase, take squares of `image_size` pixels."""

    first_step: int
    image_size: int


def phase_at(phases: Sequence[SizePhase], *, step: int) -> int:
    """Find the number of the phase of `step`; the first begins at step 0. -1 without phases."""
    return bisect_right(phases, step, key=lambda phase: phase.first_step) - 1


def size_at(phases: Sequence[SizePhase], *, step: int) -> int | None:
    """Find the side of the images of `step`; None without phases."""
    return phases[phase_at(phases, step=step)].image_size if phases else None

"""Lengths of training as people write them: "400 steps", "7 epochs", "1e6 images", "10%".

Pure arithmetic. A length becomes a number of optimizer steps once the batch size, the size of the data set and, for a
percentage, the whole stage's steps are known.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

Unit = Literal["steps", "epochs", "images", "%"]

_LONGEST = 1e15
_PATTERN = re.compile(r"\s*([0-9][0-9_]*\.?[0-9]*(?:[eE]\+?[0-9]+)?)\s*(steps?|epochs?|images?|%)\s*")


@dataclass(frozen=True)
class Duration:
    """A length in one of the units."""

    amount: float
    unit: Unit


def parse_duration(text: str) -> Duration:
    """Read a length.

    Raises:
        ValueError: it is no number with a unit.
    """
    match = _PATTERN.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{text!r} is no duration: write it like '400 steps', '7 epochs', '1e6 images' or '10%'")
    if float(match[1].replace("_", "")) > _LONGEST:
        raise ValueError(f"{text!r} is too long: write it like '400 steps', '7 epochs', '1e6 images' or '10%'")
    unit = match[2] if match[2] == "%" else match[2].rstrip("s") + "s"
    return Duration(amount=float(match[1].replace("_", "")), unit=unit)  # pyright: ignore[reportArgumentType]


def in_steps(
    duration: Duration, *, global_batch_images: int, samples_per_epoch: int, total_steps: int | None = None
) -> int:
    """The length in whole optimizer steps, to the nearest, and at least one unless the amount is zero.

    Args:
        duration: what to convert.
        global_batch_images: images of one step.
        samples_per_epoch: images of one epoch.
        total_steps: what a percentage is taken of.

    Raises:
        ValueError: a percentage where there is nothing to take it of.
    """
    match duration.unit:
        case "steps":
            steps = duration.amount
        case "images":
            steps = duration.amount / global_batch_images
        case "epochs":
            steps = duration.amount * samples_per_epoch / global_batch_images
        case "%":
            if total_steps is None:
                raise ValueError("a stage's own length cannot be a percentage: give steps, epochs or images")
            steps = duration.amount * total_steps / 100  # in this order 29% of 50 is 14.5
    return 0 if duration.amount == 0 else max(1, math.floor(steps + 0.5))

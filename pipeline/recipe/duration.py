"""Base class of the recipe's groups, durations ("7 epochs", "10%") and sizes ("500 GB")."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from shardvit.data_shards.text import parse_bytes

Unit = Literal["steps", "epochs", "images", "%"]

_LONGEST = 1e15
_PATTERN = re.compile(r"\s*([0-9][0-9_]*\.?[0-9]*(?:[eE]\+?[0-9]+)?)\s*(steps?|epochs?|images?|%)\s*")
_EXAMPLES = "write it like '400 steps', '7 epochs', '1e6 images' or '10%'"


class Strict(BaseModel):
    """Frozen; refuses unknown keys, and values with `problems`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def problems(self) -> Iterator[str]:
        """List conflicts between valid values; the first sentence is the error."""
        yield from ()

    def ignored(self, *keys: str, why: str, group: str = "") -> Iterator[str]:
        """List these keys if they were changed, as they have no effect."""
        for key in keys:
            if getattr(self, key) != type(self).model_fields[key].default:
                yield f"{group}{key} has no effect {why}: leave it out"

    @model_validator(mode="after")
    def _no_problem(self) -> Self:
        for problem in self.problems():
            raise ValueError(problem)
        return self


@dataclass(frozen=True)
class Duration:
    """Length in one unit."""

    amount: float
    unit: Unit


def parse_duration(text: str) -> Duration:
    """Parse a length; ValueError if it is not a number with a unit."""
    match = _PATTERN.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a duration: {_EXAMPLES}")
    amount = float(match[1].replace("_", ""))
    if amount > _LONGEST:
        raise ValueError(f"{text!r} is too long: {_EXAMPLES}")
    unit = match[2] if match[2] == "%" else match[2].rstrip("s") + "s"
    return Duration(amount, unit)  # pyright: ignore[reportArgumentType]


def in_steps(
    duration: Duration, *, global_batch_images: int, samples_per_epoch: int, total_steps: int | None = None
) -> int:
    """Round to optimizer steps, at least one unless zero; ValueError for % without `total_steps`."""
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
            steps = duration.amount * total_steps / 100  # in this order: 29% of 50 is exactly 14.5
    return 0 if duration.amount == 0 else max(1, math.floor(steps + 0.5))


def _checked_duration(text: str) -> str:
    parse_duration(text)
    return text


def _checked_bytes(text: str) -> str:
    parse_bytes(text)
    return text


DurationText = Annotated[str, AfterValidator(_checked_duration), Field(json_schema_extra={"format": "duration"})]
"""Such as "400 steps", "7 epochs", "1e6 images" or "10%"."""

BytesText = Annotated[str, AfterValidator(_checked_bytes), Field(json_schema_extra={"format": "bytes"})]
"""Such as "500 GB" or "1.5TB"."""

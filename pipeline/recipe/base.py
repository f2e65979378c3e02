"""What every part of the recipe is made of: strict models, durations and sizes as text."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from data_shards.text import parse_bytes
from pipeline.recipe.duration import parse_duration


class Strict(BaseModel):
    """Frozen, and refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _checked_duration(text: str) -> str:
    parse_duration(text)
    return text


def _checked_bytes(text: str) -> str:
    parse_bytes(text)
    return text


DURATION, BYTES = AfterValidator(_checked_duration), AfterValidator(_checked_bytes)

DurationText = Annotated[str, DURATION]
"""Such as "400 steps", "7 epochs", "1e6 images" or "10%"."""

BytesText = Annotated[str, BYTES]
"""Such as "500 GB" or "1.5TB"."""

"""Flags that several commands have: their types, and mistakes in their values as one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from data_shards.errors import UserError
from pipeline.recipe.vocabulary import WeightsKind

if TYPE_CHECKING:
    from pydantic import ValidationError

    from data_shards.images.decode import PixelLimit

RunsFolder = Annotated[Path, Parameter(help="Folder of all runs and of mlflow.db.")]
WhichWeights = Annotated[
    WeightsKind | None,
    Parameter(
        name="--weights",
        help="Of a checkpoint: as trained, or their moving average (ema); default: what its stage writes.",
    ),
]
CacheFolder = Annotated[
    Path | None, Parameter(help="Folder for downloaded shards; default: shardvit-cache-USER in $TMPDIR or /tmp.")
]
DataFile = Annotated[
    Path | None,
    Parameter(
        help="YAML file with the shards of each role, ROLE: {train: SHARDS, eval: SHARDS}; default: $SHARDVIT_DATA."
    ),
]
JsonFlag = Annotated[bool, Parameter(name="--json", negative="", help="Print the result as JSON.")]
TarLabel = Annotated[
    str | None, Parameter(help="Where tars without a manifest have their labels: cls, txt or json:KEY.")
]
TarClasses = Annotated[Path | None, Parameter(help="File with the classes' names, for tars without a manifest.")]
TarsAreMultiLabel = Annotated[
    bool, Parameter(negative="", help="Tars without a manifest have a list of labels for each image.")
]
Device = Annotated[Literal["auto", "cpu", "cuda"], Parameter(help="Where to run; auto: a GPU if there is one.")]
MaxImagePixels = Annotated[
    int, Parameter(help="Larger images are not decoded, which takes up to 17 bytes a pixel and core.")
]


def pixel_limit(max_image_pixels: int) -> PixelLimit:
    """The flag's value, as decoding takes it; raises UserError if it is no number of pixels that can be allowed."""
    from data_shards.images.decode import PixelLimit

    return PixelLimit(max_image_pixels, name="--max-image-pixels")


def demand_counts(**flags: int | None) -> None:
    """Raises UserError if a flag is given and below 1."""
    for name, number in flags.items():
        if number is not None and number < 1:
            raise UserError(f"--{name.replace('_', '-')}: it is {number}; give 1 or more")


def flag_mistake(error: ValidationError) -> UserError:
    """The first mistake that pydantic has found in flags' values."""
    first = error.errors(include_url=False, include_context=False)[0]
    flag = f"--{str(first['loc'][0]).replace('_', '-')}: " if first["loc"] else ""
    return UserError(f"{flag}{first['msg'].removeprefix('Value error, ')}")


def size_bytes(flag: str, text: str | None) -> int | None:
    """The value of a flag such as 256MB; None: left out. Raises UserError if it is no size."""
    from data_shards.text import parse_bytes

    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise UserError(f"{flag}: {error}") from None

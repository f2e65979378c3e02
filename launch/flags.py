"""Flags that several commands have: their types, and mistakes in their values as one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from data_shards.errors import UserError
from data_shards.vocabulary import USUAL_MOST_PIXELS
from pipeline.recipe.vocabulary import WeightsKind

if TYPE_CHECKING:
    from pydantic import ValidationError

    from data_shards.images.decode import PixelLimit
    from data_shards.shards.shard_set import ShardsSpec
    from data_shards.store.cache import CacheConfig


def switch(words: str, name: str | None = None) -> Parameter:
    """Describe a flag that is off unless given."""
    return Parameter(name=name, negative="", show_default=False, help=words)


RunsFolder = Annotated[Path, Parameter(help="Folder of all runs and of mlflow.db.")]
WhichWeights = Annotated[
    WeightsKind | None,
    Parameter(
        name="--weights",
        help="Trained or averaged (ema) weights; default: as its stage says.",
    ),
]
DataFile = Annotated[
    Path | None,
    Parameter(help="YAML file, ROLE: {train: SHARDS, eval: SHARDS}; default: $SHARDVIT_DATA."),
]
JsonFlag = Annotated[bool, switch("Print the result as JSON.", "--json")]
TarLabel = Annotated[str | None, Parameter(help="Labels in tars without a manifest: cls, txt or json:KEY.")]
TarClasses = Annotated[Path | None, Parameter(help="File of class names, for tars without a manifest.")]
TarsAreMultiLabel = Annotated[bool, switch("Several labels per image in tars without a manifest.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], Parameter(help="auto: a GPU, if any.")]
MaxImagePixels = Annotated[int, Parameter(help="Do not decode larger images (17 bytes a pixel).")]


@Parameter(name="*")
@dataclass(frozen=True)
class ShardsOptions:
    """Flags of commands that read shards alone: labels of tars without a manifest, and the cache of remote ones."""

    label: TarLabel = None
    classes: TarClasses = None
    multi_label: TarsAreMultiLabel = False
    max_image_pixels: MaxImagePixels = USUAL_MOST_PIXELS
    cache: Annotated[
        Path | None, Parameter(help="Downloaded shards; default: shardvit-cache-USER in $TMPDIR or /tmp.")
    ] = None
    cache_limit: Annotated[str | None, Parameter(help="Size of that folder, oldest removed first; default: 50GB.")] = (
        None
    )

    def spec(self, location: str) -> ShardsSpec:
        """The shards at `location`."""
        from data_shards.shards.shard_set import ShardsSpec

        kind = "multi" if self.multi_label else "single"
        return ShardsSpec(location, label=self.label, kind=kind, classes=self.classes)

    def cache_of(self, *locations: str) -> CacheConfig | None:
        """The cache; None: all locations are local, and UserError if one of its flags is given then."""
        from data_shards.shards.location import is_local
        from data_shards.store.cache import CacheConfig, default_cache_folder

        if not all(map(is_local, locations)):
            limit_bytes = size_bytes("--cache-limit", self.cache_limit) or CacheConfig.limit_bytes
            return CacheConfig(self.cache or default_cache_folder(), limit_bytes=limit_bytes)
        if (self.cache, self.cache_limit) != (None, None):
            raise UserError(f"--cache, --cache-limit: {locations[0]} is local and is not copied; leave them out")
        return None


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

"""Flags shared by several commands: types, value checks, and the rule for outputs, checked before any work.

Replace an existing output only if the same command wrote it, or with --force. Write into a run only at the command's
own place there; never to a device, FIFO, socket or symbolic link.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from shardvit.data_shards.durable import replace_text
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.vocabulary import USUAL_MOST_PIXELS, EngineName
from shardvit.pipeline.recipe.vocabulary import ALL_STAGES, RECIPE_FILE, STAGE_FILE, WeightsKind

if TYPE_CHECKING:
    from pydantic import ValidationError

    from shardvit.data_shards.engines.engine import PartsEngine
    from shardvit.data_shards.images.decode import PixelLimit
    from shardvit.data_shards.shards.shard_set import ShardsSpec
    from shardvit.data_shards.store.cache import CacheConfig


def switch(words: str, name: str | None = None) -> Parameter:
    """Declare a flag that is off by default."""
    return Parameter(name=name, negative="", show_default=False, help=words)


RunsFolder = Annotated[Path, Parameter(help="Folder of all runs and of mlflow.db.")]
WhichWeights = Annotated[
    WeightsKind | None, Parameter(name="--weights", help="Trained or averaged (ema) weights; default: its stage's.")
]
DataFile = Annotated[
    Path | None, Parameter(help="YAML file, ROLE: {train: SHARDS, eval: SHARDS}; default: $SHARDVIT_DATA.")
]
JsonFlag = Annotated[bool, switch("Print the result as JSON.", "--json")]
TarLabel = Annotated[str | None, Parameter(help="Labels in tars without a manifest: cls, txt or json:KEY.")]
TarClasses = Annotated[Path | None, Parameter(help="File of class names, for tars without a manifest.")]
TarsAreMultiLabel = Annotated[bool, switch("Several labels per image in tars without a manifest.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], Parameter(help="auto: a GPU, if any.")]
MaxImagePixels = Annotated[int, Parameter(help="Do not decode larger images (17 bytes a pixel).")]

Force = Annotated[bool, switch("Replace what is there, whatever wrote it.", "--force")]
_JSON_HELP = "Write the result as JSON, too; -: to standard output, alone."
JsonFile = Annotated[Path | None, Parameter(name="--json", allow_leading_hyphen=True, help=_JSON_HELP)]
PageCommand = Literal["report", "show", "figures", "check", "pack"]
INDEX_FILE = "index.html"  # of a page written as a folder
_MOST_BYTES = 2**26  # larger than any of our outputs
_STDOUT = Path("-")


@Parameter(name="*")
@dataclass(frozen=True)
class ShardsOptions:
    """Flags of commands that only read shards: labels of tars without a manifest, and the cache of remote shards."""

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
        from shardvit.data_shards.shards.shard_set import ShardsSpec

        kind = "multi" if self.multi_label else "single"
        return ShardsSpec(location, label=self.label, kind=kind, classes=self.classes)

    def cache_of(self, *locations: str) -> CacheConfig | None:
        """Return the cache, or None if all locations are local; UserError if cache flags are given then."""
        from shardvit.data_shards.shards.location import is_local
        from shardvit.data_shards.store.cache import CacheConfig, default_cache_folder

        if not all(map(is_local, locations)):
            limit_bytes = size_bytes("--cache-limit", self.cache_limit) or CacheConfig.limit_bytes
            return CacheConfig(self.cache or default_cache_folder(), limit_bytes=limit_bytes)
        if (self.cache, self.cache_limit) != (None, None):
            raise UserError(f"--cache, --cache-limit: {locations[0]} is local and is not copied; leave them out")
        return None


@Parameter(name="*")
@dataclass(frozen=True)
class EngineOptions:
    """Flags of commands whose work is in parts: where these run."""

    engine: Annotated[
        EngineName,
        Parameter(
            show_choices=False, show_default=False, help="processes (of this machine) or ray (--address HEAD:6379)."
        ),
    ] = "processes"
    workers: Annotated[int | None, Parameter(help="Most parts at a time; default: as there are CPUs.")] = None
    address: Annotated[str | None, Parameter(show=False)] = None

    def open(self, *locations: str) -> AbstractContextManager[PartsEngine | None]:
        """Open the engine, which must see local ones of `locations` on all nodes; None: no flag was given."""
        from shardvit.data_shards.engines.engine import open_engine
        from shardvit.data_shards.shards.location import is_local, local_path

        demand_counts(workers=self.workers)
        if self == EngineOptions():
            return nullcontext()
        seen = [path for each in locations if is_local(each) and (path := local_path(each)).exists()]
        return open_engine(self.engine, workers=self.workers, address=self.address, seen_by_all=seen)


def pixel_limit(max_image_pixels: int) -> PixelLimit:
    """Convert the flag for decoding; UserError if the number is not allowed."""
    from shardvit.data_shards.images.decode import PixelLimit

    return PixelLimit(max_image_pixels, name="--max-image-pixels")


def demand_counts(**flags: int | None) -> None:
    """Raise UserError if a flag is given and below 1."""
    for name, number in flags.items():
        if number is not None and number < 1:
            raise UserError(f"--{name.replace('_', '-')}: it is {number}; give 1 or more")


def flag_mistake(error: ValidationError) -> UserError:
    """Convert pydantic's first error to a UserError that names the flag."""
    first = error.errors(include_url=False, include_context=False)[0]
    flag = f"--{str(first['loc'][0]).replace('_', '-')}: " if first["loc"] else ""
    return UserError(f"{flag}{first['msg'].removeprefix('Value error, ')}")


def size_bytes(flag: str, text: str | None) -> int | None:
    """Parse a size such as 256MB; UserError if invalid."""
    from shardvit.data_shards.text import parse_bytes

    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise UserError(f"{flag}: {error}") from None


def demand_target(
    path: Path | None, *, flag: str, force: bool, mark: str = "", file: str = "", own_place: Path | None = None
) -> None:
    """Raise UserError, naming `flag`, if `path` must not be written. `mark` is text in every output of the command (for
    a folder, in its `file`); without it, replacing needs --force. `own_place` is the command's place in a run."""
    if path in (None, _STDOUT):
        return
    if path.is_symlink() or (path.exists() and not (path.is_file() or path.is_dir())):
        raise UserError(f"{flag} {path}: it is a link or a device, which is not written to: give another place")
    place = Path(os.path.realpath(path))
    if own_place is not None and place == Path(os.path.realpath(own_place)):
        return
    if (run := next(filter(_is_run, (place, *place.parents)), None)) is not None:
        raise UserError(f"{flag} {path}: it lies in the run {run}, which has its own files: give another place")
    marked = path / file if path.is_dir() else path
    try:
        is_small = marked.is_file() and marked.stat().st_size < _MOST_BYTES
        is_ours = mark and is_small and mark.encode() in marked.read_bytes()
        is_taken = path.is_file() or (path.is_dir() and any(path.iterdir()))
    except OSError as error:
        raise UserError(f"{flag} {path}: it cannot be read ({error.strerror}): give another place") from None
    if is_taken and not (force or is_ours):
        why = "this command did not write it" if mark else "it may be another model"
        raise UserError(f"{flag} {path}: it exists, and {why}: give another place, or --force")


def page_mark(command: PageCommand) -> str:
    """Return the last line of every page that the command writes."""
    return f"<!-- written by shardvit {command} -->\n"


def tell_result(shown: str, *, as_json: str, json_file: Path | None) -> None:
    """Print a result and write its JSON to `json_file`, or print only the JSON for -; UserError if unwritable."""
    print(as_json if json_file == _STDOUT else shown, flush=True)
    if json_file not in (None, _STDOUT):
        try:
            replace_text(json_file, f"{as_json}\n", sync="none")
        except OSError as error:
            raise UserError(f"--json {json_file}: it cannot be written ({error.strerror})") from None


def _is_run(folder: Path) -> bool:
    begun = any((folder / name / STAGE_FILE).exists() for name in ALL_STAGES)
    return begun or ((folder / RECIPE_FILE).exists() and any(folder.glob(".*.lock")))


Trust = Annotated[
    Path | None,
    Parameter(help="File of the run's own model: if unchanged, it is executed."),
]

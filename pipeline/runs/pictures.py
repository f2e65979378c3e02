"""Write and read a stage's pictures: STAGE/pictures/NAME/step-00000400.png, .svg and .json.

The .json holds the texts, or a table, which has no image. It is written last and commits the picture. All steps are
kept; the report shows the newest. Imports no torch or matplotlib.
"""

import errno
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from shardvit.data_shards.durable import make_folders, replaced
from shardvit.data_shards.safe_paths import is_inside, read_inside
from shardvit.data_shards.text import parse_json
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import PICTURES_FOLDER, StageName
from shardvit.pipeline.runs.run_folder import RunFolder

PictureGroup = Literal["data", "evaluation", "model", "paper"]
Moment = Literal["begin", "evaluated", "end"]
Cell = str | int | float | None

_STEP = "step-{:08d}"
_FILE = re.compile(r"step-(\d{8,18})\.json")


@dataclass(frozen=True)
class DrawRequest:
    """A stage to draw after `step` optimizer steps."""

    folder: RunFolder
    recipe: Recipe
    stage: StageName
    step: int

    @property
    def stage_folder(self) -> Path:
        return self.folder.stage(self.stage)


@dataclass(frozen=True)
class Picture:
    """A picture's name and texts."""

    name: str  # also its folder's, [a-z0-9_]+
    title: str
    caption: str  # how to read it, with units
    alt: str  # for screen readers, with the key numbers
    group: PictureGroup

    def __post_init__(self) -> None:
        if not re.fullmatch("[a-z0-9_]+", self.name) or self.group not in get_args(PictureGroup):
            raise ValueError(f"{self.name!r} in group {self.group!r} is no picture's name")


@dataclass(frozen=True)
class KeptPicture:
    """A picture on disk: an image or a table."""

    picture: Picture
    step: int
    png: Path | None
    svg: Path | None
    table: Mapping[str, Sequence[Cell]] | None
    words: Path  # the .json

    @property
    def key(self) -> str:
        """Unique within its stage."""
        return f"{self.picture.name} {self.step}"


def keep_image(stage_folder: Path, picture: Picture, *, png: bytes, svg: bytes, step: int) -> Path:
    """Write a picture; returns its .json. OSError if the stage folder is gone or the disk is full or fails."""
    words = _words_file(stage_folder, picture, step=step)
    for ending, content in ((".png", png), (".svg", svg)):
        with replaced(words.with_suffix(ending), sync="none", writers="several") as beside:
            beside.write_bytes(content)
    return _keep_words(words, picture, step=step, more={})


def keep_table(stage_folder: Path, picture: Picture, *, columns: Mapping[str, Sequence[Cell]], step: int) -> Path:
    """Write a table, columns of equal length by heading; returns its .json. OSError as `keep_image`."""
    if len({len(each) for each in columns.values()}) != 1:
        raise ValueError(f"{picture.name}: the columns are of different lengths")
    more = {"table": {name: list(values) for name, values in columns.items()}}
    return _keep_words(_words_file(stage_folder, picture, step=step), picture, step=step, more=more)


def kept_pictures(stage_folder: Path) -> list[KeptPicture]:
    """List complete pictures and tables by name, then step; skips damaged ones."""
    files = (stage_folder / PICTURES_FOLDER).glob("*/step-*.json")
    found = [picture for words in files if _FILE.fullmatch(words.name) and (picture := _read(words)) is not None]
    return sorted(found, key=lambda each: (each.picture.name, each.step))


def newest_pictures(kept: Sequence[KeptPicture]) -> list[KeptPicture]:
    """Keep the last of each name; `kept` is sorted as by `kept_pictures`."""
    return list({each.picture.name: each for each in kept}.values())


def _words_file(stage_folder: Path, picture: Picture, *, step: int) -> Path:
    words = stage_folder / PICTURES_FOLDER / picture.name / f"{_STEP.format(step)}.json"
    if not is_inside(words, folder=stage_folder):
        raise OSError(errno.ELOOP, f"a link leads out of {stage_folder}", str(words.parent))
    make_folders(words.parent, below=stage_folder)
    return words


def _keep_words(words: Path, picture: Picture, *, step: int, more: Mapping[str, object]) -> Path:
    said = {name: value for name, value in vars(picture).items() if name != "name"}  # the folder carries the name
    with replaced(words, sync="none", writers="several") as beside:
        beside.write_text(json.dumps({**said, "step": step, **more}) + "\n", encoding="utf-8")
    return words


def _read(words: Path) -> KeptPicture | None:
    png, svg = words.with_suffix(".png"), words.with_suffix(".svg")
    try:
        record = parse_json(read_inside(words, folder=words.parents[2]))
        texts = {name: str(record[name]) for name in ("title", "caption", "alt")}
        picture = Picture(words.parent.name, **texts, group=record["group"])
        table = record.get("table")
        if table is not None:
            table = {str(name): list(values) for name, values in table.items()}
            if len({len(each) for each in table.values()}) != 1:
                return None
        elif not all(each.is_file() and is_inside(each, folder=words.parents[2]) for each in (png, svg)):
            return None
        step = int(record["step"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    has_image = table is None
    return KeptPicture(picture, step, png if has_image else None, svg if has_image else None, table, words)

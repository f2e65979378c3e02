"""Keep a page below its size limit, whatever a run's folder holds, and note what was left out.

A block takes at most half of the remaining bytes (charts: all); a table loses its last rows. Pictures become SVG unless
that is much larger than the raster: it is sharp, searchable and follows the dark scheme. To fit, older steps go first;
then the largest become ever smaller WebP (a tenth of a second each); then they go too.
"""

import base64
import io
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from html import escape
from itertools import accumulate
from typing import Any

from shardvit.data_shards.text import one_line, printable, show_bytes
from shardvit.launch.pages.blocks import ChartBlock, PageImage, PagePicture, PageSection, PageTable
from shardvit.pipeline.pictures.style import PNG_DOTS_PER_INCH, plain

_TAGS_BYTES, _CELL_BYTES = 300, 70  # upper bounds on the markup of a block and a cell
_SVG_MOST_BYTES, _SVG_MUCH_LARGER = 1_000_000, 3.0
_MOST_EARLIER = 7
_EARLIER_BYTES = 250_000  # for all earlier steps of a picture
_WEBP = ((82, 1280), (72, 960), (60, 640))  # quality and longest side in pixels, best first
_MOST_PIXELS = 60_000_000
_SHOWN = 96 / PNG_DOTS_PER_INCH  # CSS pixels per image pixel: a figure keeps its size in inches, like its SVG
_FORMATS = ("PNG", "JPEG")

Embedding = tuple[str, bytes]  # MIME type, content


class Fitting:
    """Remaining budget for the next blocks, and notes on what was left out."""

    def __init__(self, most_bytes: int) -> None:
        self.left_bytes = most_bytes
        self.notes: list[str] = []

    def section(self, section: PageSection) -> PageSection:
        fitted = [self._block(block) for block in section.blocks]
        return replace(section, blocks=[block for block in fitted if block is not None])

    def _block(self, block: Any) -> Any:
        if isinstance(block, PageSection):
            return self.section(block)
        room = self.left_bytes if isinstance(block, ChartBlock) else self.left_bytes // 2
        if isinstance(block, PageTable):
            left = room - _html_bytes(replace(block, rows=()))
            count = sum(num_bytes <= left for num_bytes in accumulate(map(_html_bytes, block.rows)))
            if count < len(block.rows):
                self._note(block, f"the page has room for {count:,} of its {len(block.rows):,} rows")
                block = replace(block, rows=block.rows[:count])
        num_bytes = _html_bytes(block)
        if num_bytes > room:
            return self._note(block, "the page has no room for it")
        self.left_bytes -= num_bytes
        return block

    def _note(self, block: Any, what: str) -> None:
        self.notes.append(f"{_quoted(block)}: {what}")


def _html_bytes(value: Any) -> int:
    """Upper bound on a block's markup, without images."""
    match value:
        case str():
            return _CELL_BYTES // 2 + len(escape(printable(value)).encode())
        case PagePicture():  # each image repeats the texts
            return len(value.images) * (_TAGS_BYTES + _html_bytes([value.title, value.caption, value.alt]))
        case Mapping():  # script data, with markup escaped
            text = json.dumps(value)
            return len(text) + 5 * sum(map(text.count, "<>&"))
        case tuple() | list():
            return sum(map(_html_bytes, value))
        case _ if is_dataclass(value):
            parts = {each.name: getattr(value, each.name) for each in fields(value)}
            return _TAGS_BYTES + len(parts.pop("svg", "")) + sum(map(_html_bytes, parts.values()))
        case _:
            return _CELL_BYTES


@dataclass(frozen=True)
class EmbeddedImage:
    """Data, size in CSS pixels and step of an <img>; rasters stay light in the dark scheme."""

    uri: str
    width: int
    height: int
    step: int | None
    is_raster: bool


@dataclass
class _Choice:
    """One image: its current embedding (None: left out), and smaller alternatives."""

    picture: int
    image: PageImage
    size: tuple[int, int]
    is_newest: bool
    smaller: Iterator[Embedding]
    taken: Embedding | None

    @property
    def num_bytes(self) -> int:
        return 0 if self.taken is None else 4 * len(self.taken[1]) // 3


def embedded(pictures: Sequence[PagePicture], *, budget_bytes: int) -> tuple[list[list[EmbeddedImage]], list[str]]:
    """Embed each picture's images, newest last (possibly none), and list what was left out."""
    notes: list[str] = []
    choices: list[_Choice] = []
    for number, picture in enumerate(pictures):
        spent = 0
        for age, image in enumerate(reversed(picture.images)):
            try:
                kind, size = _kind_and_size(image.raster)
            except (OSError, ValueError, SyntaxError) as error:
                step = "" if image.step is None else f" of step {image.step:,}"
                why = one_line(str(error)) or type(error).__name__
                notes.append(f"the picture {_quoted(picture)}{step} is damaged and left out ({why})")
                continue
            ways, is_newest = _ways(image, kind), not spent
            choice = _Choice(number, image, size, is_newest, ways if is_newest else iter(()), next(ways))
            spent += 1 if is_newest else choice.num_bytes
            if not is_newest and (age > _MOST_EARLIER or spent > _EARLIER_BYTES):
                break
            choices.append(choice)
    total = sum(choice.num_bytes for choice in choices)
    while total > budget_bytes:
        older = [choice for choice in choices if not choice.is_newest and choice.taken]
        largest = max(older or choices, key=lambda choice: choice.num_bytes)
        before = largest.num_bytes
        largest.taken = next(largest.smaller, None)
        total += largest.num_bytes - before
        if largest.is_newest and largest.taken is None:
            room = f"the page has room for {show_bytes(budget_bytes)} of them"
            notes.append(f"the picture {_quoted(pictures[largest.picture])} is left out: {room}")
    shown: list[list[EmbeddedImage]] = [[] for _ in pictures]
    for choice in reversed(choices):
        if choice.taken is not None:
            kind, content = choice.taken
            uri = f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"
            width, height = (max(1, round(_SHOWN * side)) for side in choice.size)
            is_raster = kind != "image/svg+xml"
            shown[choice.picture].append(EmbeddedImage(uri, width, height, choice.image.step, is_raster))
    return shown, notes


def _quoted(block: Any) -> str:
    return f"“{plain(block.title, longest=80)}”"


def _ways(image: PageImage, kind: str) -> Iterator[Embedding]:
    """Yield embeddings of an image, best first, then smaller."""
    svg = image.svg
    is_whole = svg is not None and b"<svg" in svg[:2000] and svg.rstrip().endswith(b"</svg>")
    if svg is not None and is_whole and len(svg) <= min(_SVG_MOST_BYTES, _SVG_MUCH_LARGER * len(image.raster)):
        yield "image/svg+xml", svg
    yield kind, image.raster
    for quality, longest in _WEBP:
        yield "image/webp", _as_webp(image.raster, quality=quality, longest=longest)


def _kind_and_size(raster: bytes) -> tuple[str, tuple[int, int]]:
    """MIME type, width and height of a PNG or JPEG. OSError, ValueError or SyntaxError if it is damaged."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(raster), formats=_FORMATS) as image:
                if image.width * image.height > _MOST_PIXELS:
                    raise ValueError(f"it has {image.width:,} × {image.height:,} pixels")
                image.load()
                return f"image/{image.format}".lower(), image.size
        except Image.DecompressionBombError as error:
            raise ValueError(str(error)) from None


def _as_webp(raster: bytes, *, quality: int, longest: int) -> bytes:
    from PIL import Image

    with Image.open(io.BytesIO(raster), formats=_FORMATS) as image:
        image = image.convert("RGBA" if "transparency" in image.info or image.mode in ("RGBA", "LA") else "RGB")
        image.thumbnail((longest, longest), Image.Resampling.LANCZOS)
        out = io.BytesIO()
        image.save(out, "WEBP", quality=quality, method=4)
    return out.getvalue()

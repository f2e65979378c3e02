"""Pictures as data in a page, within a budget of bytes.

An SVG where it is not much larger than its PNG (it is sharp, light and dark, and its text can be found), else the PNG.
Where all do not fit, the largest become WebP, smaller ones, and at last none, with a line that says so; earlier steps
go first. A file that is damaged is left out, with a line. Re-encoding takes a tenth of a second an image.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from data_shards.text import one_line, show_bytes
from launch.pages.blocks import PageImage, PagePicture
from pipeline.pictures.style import PNG_DOTS_PER_INCH, plain

_SVG_MOST_BYTES, _SVG_MUCH_LARGER = 1_000_000, 3.0
_MOST_EARLIER = 7
_EARLIER_BYTES = 250_000  # of one picture's earlier steps together
_WEBP = ((82, 1280), (72, 960), (60, 640))  # quality and longest side in pixels, from good to small
_MOST_PIXELS = 60_000_000
_SHOWN = 96 / PNG_DOTS_PER_INCH  # CSS pixels of an image's pixel: a figure keeps its inches, as its SVG does


@dataclass(frozen=True)
class EmbeddedImage:
    """An <img>: its data, its size in CSS pixels, its step, and whether it is light on every screen."""

    uri: str
    width: int
    height: int
    step: int | None
    is_raster: bool


@dataclass
class _Choice:
    """Ways to embed one image, from good to small, and the one taken; past the last: left out."""

    picture: int
    image: PageImage
    size: tuple[int, int]
    is_newest: bool
    ways: list[Callable[[], tuple[str, bytes]]]
    made: dict[int, tuple[str, bytes]] = field(default_factory=dict)
    taken: int = 0

    @property
    def num_bytes(self) -> int:
        return 0 if self.taken >= len(self.ways) else 4 * len(self.current()[1]) // 3

    def current(self) -> tuple[str, bytes]:
        if self.taken not in self.made:
            self.made[self.taken] = self.ways[self.taken]()
        return self.made[self.taken]


def embedded(
    pictures: Sequence[PagePicture], *, budget_bytes: int
) -> tuple[list[tuple[EmbeddedImage, ...]], list[str]]:
    """For each picture its images, the newest last (none: left out), and a line for what was left out."""
    notes: list[str] = []
    choices: list[_Choice] = []
    for number, picture in enumerate(pictures):
        spent = 0
        for age, image in enumerate(reversed(picture.images)):
            size, why = _size_of(image.png)
            if size is None:
                step = "" if image.step is None else f" of step {image.step:,}"
                notes.append(f"the picture “{plain(picture.title, longest=80)}”{step} is damaged and left out ({why})")
                continue
            choice = _Choice(number, image, size, is_newest=not spent, ways=_ways(image))
            if spent:
                choice.ways = choice.ways[:1]
                spent += choice.num_bytes
                if age > _MOST_EARLIER or spent > _EARLIER_BYTES:
                    break
            spent = spent or 1
            choices.append(choice)
    total = sum(choice.num_bytes for choice in choices)
    while total > budget_bytes:
        older = [choice for choice in choices if not choice.is_newest and choice.num_bytes]
        largest = max(older or choices, key=lambda choice: choice.num_bytes)
        before = largest.num_bytes
        largest.taken += 1
        total += largest.num_bytes - before
        if largest.is_newest and not largest.num_bytes:
            title = plain(pictures[largest.picture].title, longest=80)
            notes.append(f"the picture “{title}” is left out: the page has room for {show_bytes(budget_bytes)} of them")
    shown: list[list[EmbeddedImage]] = [[] for _ in pictures]
    for choice in reversed(choices):
        if choice.num_bytes:
            kind, content = choice.current()
            uri = f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"
            width, height = (max(1, round(_SHOWN * side)) for side in choice.size)
            shown[choice.picture].append(
                EmbeddedImage(uri, width, height, choice.image.step, is_raster=kind != "image/svg+xml")
            )
    return [tuple(images) for images in shown], notes


def _ways(image: PageImage) -> list[Callable[[], tuple[str, bytes]]]:
    ways: list[Callable[[], tuple[str, bytes]]] = []
    svg = image.svg
    if svg is not None and _is_whole_svg(svg) and len(svg) <= min(_SVG_MOST_BYTES, _SVG_MUCH_LARGER * len(image.png)):
        ways.append(lambda: ("image/svg+xml", svg))
    ways.append(lambda: ("image/png", image.png))
    ways += [lambda way=way: ("image/webp", _as_webp(image.png, quality=way[0], longest=way[1])) for way in _WEBP]
    return ways


def _is_whole_svg(svg: bytes) -> bool:
    return b"<svg" in svg[:2000] and svg.rstrip().endswith(b"</svg>")


def _size_of(png: bytes) -> tuple[tuple[int, int] | None, str]:
    """Width and height; None: it cannot be shown, and why."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
                if image.width * image.height > _MOST_PIXELS:
                    return None, f"it has {image.width:,} × {image.height:,} pixels"
                image.load()
                return (image.width, image.height), ""
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return None, one_line(str(error)) or type(error).__name__


def _as_webp(png: bytes, *, quality: int, longest: int) -> bytes:
    from PIL import Image

    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        image = image.convert("RGBA" if "transparency" in image.info or image.mode in ("RGBA", "LA") else "RGB")
        image.thumbnail((longest, longest), Image.Resampling.LANCZOS)
        out = io.BytesIO()
        image.save(out, "WEBP", quality=quality, method=4)
    return out.getvalue()

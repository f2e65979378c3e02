"""The matches as files: every pair as a line of JSON, and the pairs as pictures on one HTML page.

    matches.jsonl   image {part, key}, other {part, key}, against (the other set), kind, likeness, mirrored
    matches.html    the pairs side by side, up to 250 of each kind; it needs no other file

Both have the most alike first: equal bytes, equal pixels, near-duplicates, and those that are unsure.

What the images' names hold is escaped. Takes 2 ms a pair of pictures.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from data_shards.checking.near_duplicates.collection import Collection
from data_shards.checking.near_duplicates.matches import MATCH_KINDS, Match, Matches, MatchKind, read
from data_shards.durable import replace_text
from data_shards.errors import UnreadableImage
from data_shards.images.decode import PixelLimit, read_image

LINES_FILE, PAGE_FILE = "matches.jsonl", "matches.html"
MOST_PICTURES = 250  # pairs of each kind; some 8 kB each
_PIXELS = 160  # of a picture's longer side
_SMALL_PIXELS = 80  # shorter than this, it is enlarged without smoothing
_TITLES: dict[MatchKind, str] = {
    "equal-bytes": "Equal bytes",
    "equal-pixels": "Equal pixels",
    "near-duplicate": "Near-duplicates",
    "unsure": "Unsure: these may be the same, and do not count",
}
_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: .2em 1em .2em 0; text-align: left }
.pairs { display: flex; flex-wrap: wrap; gap: 1.2em } figure { margin: 0; width: 340px }
figure div { display: flex; gap: 6px; align-items: flex-end; min-height: 60px }
figcaption { font-size: 12px; overflow-wrap: anywhere } img.small { image-rendering: pixelated }
"""


def line(found: Matches, match: Match) -> dict[str, Any]:
    """A match as an entry of `matches.jsonl`."""
    return {
        "image": found.place(match)._asdict(),
        "other": found.other_place(match)._asdict(),
        "against": found.others[match.collection].name,
        "kind": match.kind,
        "likeness": match.likeness,
        "mirrored": match.mirrored,
    }


def write_report(folder: Path, found: Sequence[Matches], *, limit: PixelLimit) -> None:
    """Write both files into `folder`, which is made; files of an earlier report are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(line(one, match), ensure_ascii=False) for one in found for match in one.matches)
    text = "".join(f"{each}\n" for each in lines)
    # Bytes in a key that are not UTF-8 become JSON escapes.
    replace_text(folder / LINES_FILE, text.encode("utf-8", "backslashreplace").decode())
    write_page(folder / PAGE_FILE, found, limit=limit)


def write_page(path: Path, found: Sequence[Matches], *, limit: PixelLimit) -> None:
    """Write the page alone, to any path."""
    replace_text(path, "".join(_page(found, limit)))


def _page(found: Sequence[Matches], limit: PixelLimit) -> Iterable[str]:
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Duplicates</title><style>{_STYLE}</style>'
    yield "<h1>Images that are also in other sets</h1><table><tr><th>images of<th>also in"
    yield "<th>equal bytes<th>equal pixels<th>near-duplicates<th>unsure</tr>"
    for one in found:
        for number, other in enumerate(one.others):
            kinds = [match.kind for match in one.matches if match.collection == number]
            counts = [f"{kinds.count(kind):,}" for kind in MATCH_KINDS]
            cells = "".join(f"<td>{_text(cell)}" for cell in (one.images.name, other.name, *counts))
            yield f"<tr>{cells}</tr>"
    yield "</table>"
    for kind in MATCH_KINDS:
        pairs = [(one, match) for one in found for match in one.matches if match.kind == kind]
        pairs.sort(key=lambda pair: -pair[1].likeness)
        if not pairs:
            continue
        yield f"<h2>{_TITLES[kind]}</h2>"
        if len(pairs) > MOST_PICTURES:
            yield f"<p>The {MOST_PICTURES:,} most alike of {len(pairs):,}; the list beside this page has all.</p>"
        yield '<div class="pairs">'
        for one, match in pairs[:MOST_PICTURES]:
            image, other = one.place(match), one.other_place(match)
            mirrored = ", mirrored" if match.mirrored else ""
            how = "" if kind.startswith("equal") else f"likeness {match.likeness:.3f}{mirrored}<br>"
            yield f"<figure><div>{_picture(one.images, match.image, limit)}"
            yield f"{_picture(one.others[match.collection], match.other, limit)}</div>"
            yield f"<figcaption>{how}{_text(image.key)} in "
            yield f"{_text(image.part)}<br>{_text(other.key)} in {_text(other.part)}</figcaption></figure>"
        yield "</div>"
    yield "</html>\n"


def _text(text: str) -> str:
    return escape(text.encode("utf-8", "backslashreplace").decode())


def _picture(collection: Collection, number: int, limit: PixelLimit) -> str:
    from PIL import Image

    try:
        pixels = read_image(read(collection, number), limit=limit).pixels()
    except UnreadableImage:
        return "<span>not readable</span>"
    image = Image.fromarray(pixels)
    image.thumbnail((_PIXELS, _PIXELS))
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=85)
    scale = _PIXELS / max(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    name = ' class="small"' if max(image.size) < _SMALL_PIXELS else ""
    data = base64.b64encode(stream.getvalue()).decode()
    return f'<img{name} width="{width}" height="{height}" alt="" src="data:image/jpeg;base64,{data}">'

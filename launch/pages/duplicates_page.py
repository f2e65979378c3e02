"""Write the page of `check --against` and `pack --exclude`: duplicate pairs, most alike first. Takes 2 ms a pair."""

import io
from collections.abc import Sequence
from pathlib import Path

from shardvit.data_shards.checking.near_duplicates.matches import MATCH_KINDS, Match, Matches, MatchKind, read
from shardvit.data_shards.errors import UnreadableImage
from shardvit.data_shards.images.decode import PixelLimit, read_image
from shardvit.launch.flags import PageCommand
from shardvit.launch.pages.blocks import PageCell, PageImage, PagePicture, PageSection, PageTable
from shardvit.launch.pages.page import render_page

MATCHES_PAGE = "matches.html"
TITLE = "Duplicates"
MOST_PICTURES = 250  # pairs of each kind
_PIXELS = 260  # of an image's longer side; displayed at 96 / 160 scale
_GAP = 10
_TITLES: dict[MatchKind, str] = {
    "equal-bytes": "Equal bytes",
    "equal-pixels": "Equal pixels",
    "near-duplicate": "Near-duplicates",
    "unsure": "Unsure: these may be the same, and do not count",
    "semantic": "Semantic: alike by the model's features, and no fault",
}


def write_duplicates(
    file: Path, found: Sequence[Matches], limit: PixelLimit, *, command: PageCommand = "check"
) -> None:
    """Write the page of `command`. UserError if that fails."""
    rows: list[list[PageCell]] = []
    for one in found:
        for number, other in enumerate(one.others):
            kinds = [match.kind for match in one.matches if match.collection == number]
            rows.append([one.images.name, other.name, *map(kinds.count, MATCH_KINDS)])
    columns = ("images of", "also in", *(kind.replace("-", " ") for kind in MATCH_KINDS))
    sections = [PageSection("Images that are also in other sets", [PageTable(columns, rows)])]
    for kind in MATCH_KINDS:
        pairs = [(one, match) for one in found for match in one.matches if match.kind == kind]
        pairs.sort(key=lambda pair: -pair[1].likeness)
        more = f"The {MOST_PICTURES:,} most alike of {len(pairs):,}; the list beside this page has all."
        blocks = [_pair(one, match, limit=limit) for one, match in pairs[:MOST_PICTURES]]
        sections.append(PageSection(_TITLES[kind], blocks, intro=more if len(pairs) > MOST_PICTURES else ""))
    render_page(TITLE, sections=sections).write(file, command=command)


def _pair(found: Matches, match: Match, *, limit: PixelLimit) -> PagePicture:
    from PIL import Image

    paper = Image.new("RGB", (2 * _PIXELS + _GAP, _PIXELS), "white")
    images = ((found.images, match.image), (found.others[match.collection], match.other))
    for number, (collection, at) in enumerate(images):
        try:
            image = Image.fromarray(read_image(read(collection, at), limit=limit).pixels()).convert("RGB")
        except UnreadableImage:
            image = Image.new("RGB", (8, 8), "lightgrey")
        scale = _PIXELS / max(image.size)
        size = [max(1, round(side * scale)) for side in image.size]
        image = image.resize(size, Image.Resampling.NEAREST if scale > 2 else Image.Resampling.LANCZOS)
        paper.paste(image, (number * (_PIXELS + _GAP), _PIXELS - image.height))
    stream = io.BytesIO()
    paper.save(stream, "JPEG", quality=85)
    image, other = found.place(match), found.other_place(match)
    measure = "cosine" if match.kind == "semantic" else "likeness"
    how = f"{measure} {match.likeness:.3f}{', mirrored' if match.mirrored else ''}"
    caption = f"{image.key} in {image.part}; {other.key} in {other.part}"
    return PagePicture("" if match.kind.startswith("equal") else how, caption, caption, [PageImage(stream.getvalue())])

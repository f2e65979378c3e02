"""Render a page: one HTML file with text, tables, pictures and curves that needs no network or other files.

`render_page` takes `blocks`, never markup. All text is escaped, control characters too; pictures are data URLs in <img>
(where SVG runs no scripts); the CSP allows one script and one style sheet, by digest. Costs milliseconds, plus
`budget`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardvit.data_shards.durable import replaced
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.text import one_line, printable
from shardvit.launch.flags import PageCommand, page_mark
from shardvit.launch.pages.blocks import ChartBlock, PageBlock, PagePicture, PageSection, ShownNumber
from shardvit.launch.pages.budget import Fitting, embedded
from shardvit.pipeline.pictures import style

if TYPE_CHECKING:
    from jinja2 import Environment

MOST_BYTES = 5_000_000  # of a page
_FOR_THE_REST = 250_000  # of these, for style, script and notes
_MOST_NOTES, _LONGEST_NOTE = 100, 500
_TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class Page:
    """A rendered page, and notes on what it leaves out."""

    html: str
    notes: tuple[str, ...] = ()

    def write(self, file: Path, *, command: PageCommand, beside: Mapping[str, bytes] | None = None) -> Path:
        """Write the page; with `beside`, create its folder and write these files by name. UserError if that fails."""
        contents = {file.name: (self.html + page_mark(command)).encode(), **(beside or {})}
        try:
            if beside is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
            for name, content in contents.items():
                with replaced(file.with_name(name), sync="none", writers="several") as temporary:
                    temporary.write_bytes(content)
        except OSError as error:
            place = "OUT" if command == "pack" else "place with --output"
            raise UserError(f"{file} cannot be written ({error.strerror}): give another {place}") from None
        return file


def render_page(
    title: str,
    *,
    sections: Sequence[PageSection],
    lead: str = "",
    facts: Sequence[tuple[str, str]] = (),
    notes: Sequence[str] = (),
    legend: Sequence[str] = (),
    foot: str = "",
) -> Page:
    """Render a page below `MOST_BYTES`, leaving out empty sections. `facts`: (value, label) of the headline; `notes`:
    what could not be read, a line each; `legend`: names of the runs, in the order of their colours."""
    fitting = Fitting(MOST_BYTES - _FOR_THE_REST)
    sections = [fitting.section(section) for section in sections if section.blocks]
    blocks = list(_within(sections))
    data = script_json({"groups": [block.data for block in blocks if isinstance(block, ChartBlock)]})
    pictures = [block for block in blocks if isinstance(block, PagePicture)]
    shown, left_out = embedded(pictures, budget_bytes=max(0, fitting.left_bytes))
    left_out = [*fitting.notes, *left_out]
    environment = _environment()
    css = environment.get_template("page.css.jinja").render(_palette())
    script = (_TEMPLATES / "page.js").read_text(encoding="utf-8")
    html = environment.get_template("page.html.jinja").render(
        title=title,
        lead=lead,
        facts=facts,
        sections=[(f"s{number}", section) for number, section in enumerate(sections, start=1)],
        notes=[note[:_LONGEST_NOTE] for note in [*left_out, *notes][:_MOST_NOTES]],
        runs=legend,
        foot=foot,
        shown={id(picture): images for picture, images in zip(pictures, shown, strict=True)},
        data=data,
        css=css,
        script=script,
        policy=(
            f"default-src 'none'; img-src data:; style-src '{_digest(css)}'; script-src '{_digest(script)}'; "
            "base-uri 'none'; form-action 'none'"
        ),
    )
    return Page(html, tuple(left_out))


def script_json(value: object) -> str:
    """JSON for a <script> block: ASCII with markup characters escaped, and null for NaN."""
    text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def show_number(value: float) -> str:
    """Format a number for a table: thousands separators, four digits of a fraction, powers of ten where shorter."""
    size = abs(value)
    if isinstance(value, bool) or not math.isfinite(value):
        return str(value)
    if value == int(value) and (isinstance(value, int) or size >= 1000 or not value):
        return f"{int(value):,}" if size < 1e15 else f"{float(value):.4g}"
    if size >= 1000:
        return f"{value:,.0f}" if size < 1e9 else f"{value:.4g}"
    return f"{value:.3g}" if size < 1e-3 else f"{value:.4f}" if size < 1 else f"{value:.5g}"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _within(blocks: Sequence[PageBlock]) -> Iterator[PageBlock]:
    for block in blocks:
        yield from _within(block.blocks) if isinstance(block, PageSection) else [block]


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _palette() -> dict[str, object]:
    names = ("ink", "muted", "grid", "paper", "accent", "good", "bad")
    light = {name: getattr(style, name.upper()) for name in names}
    light |= {f"s{number}": colour for number, colour in enumerate(style.SERIES)}
    return {"light": light, "dark": {name: style.DARK[colour] for name, colour in light.items()}}


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # Leave markup from `safe` and macros alone
        finalize=lambda value: printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value,
    )
    environment.filters["number"] = lambda value: value if isinstance(value, str) else show_number(value)
    environment.filters["line"] = one_line
    environment.filters["identity"] = id
    environment.tests["shown"] = lambda value: isinstance(value, ShownNumber)
    environment.tests["text"] = lambda value: isinstance(value, str)
    environment.filters["kind"] = lambda block: type(block).__name__
    return environment

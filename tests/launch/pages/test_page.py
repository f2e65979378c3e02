"""A page of hostile texts and pictures: everything is text, nothing from elsewhere is markup, and it is small."""

import base64
import hashlib
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from shardvit.launch.pages.blocks import (
    ChartBlock,
    DrawnChart,
    PageBlock,
    PageImage,
    PagePicture,
    PageSection,
    PageTable,
    PageText,
)
from shardvit.launch.pages.page import MOST_BYTES, render_page, script_json, show_number

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \"' & {{ 7*7 }} \x1b[2J \u202e \u2028 \0"


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def png(*, side: int = 8, noise: bool = False) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels if noise else pixels // 255).save(out, "PNG")
    return out.getvalue()


def test_hostile_texts_stay_text() -> None:
    svg = f"<svg xmlns='http://www.w3.org/2000/svg'>{HOSTILE}</svg>".encode()
    page = render_page(
        HOSTILE,
        lead=HOSTILE,
        facts=[(HOSTILE, HOSTILE)],
        notes=[HOSTILE],
        legend=[HOSTILE],
        foot=HOSTILE,
        sections=[
            PageSection(HOSTILE, [PageText(HOSTILE, kind="code", title=HOSTILE)], intro=HOSTILE),
            PageSection(
                "two",
                [
                    PageTable((HOSTILE, "n"), [(HOSTILE, 1)], title=HOSTILE, caption=HOSTILE, folded=True),
                    PagePicture(HOSTILE, HOSTILE, HOSTILE, [PageImage(png(), svg, step=3), PageImage(png(), step=4)]),
                ],
            ),
        ],
    )
    plain = Elements(render_page("x", sections=[]).html)
    elements = Elements(page.html)
    assert sum(tag == "script" for tag, _ in elements.tags) == sum(tag == "script" for tag, _ in plain.tags) == 2
    assert not any(name.startswith("on") for _, attributes in elements.tags for name in attributes)
    images = [attributes["src"] or "" for tag, attributes in elements.tags if tag == "img"]
    assert images and all(source.startswith("data:image/") for source in images)
    assert {attributes["href"] for tag, attributes in elements.tags if tag == "a"} == {"#s1", "#s2"}
    assert not re.search("[\x00\x1b\u202e\u2028]", page.html) and "\\x1b[2J" in elements.text
    assert "{{ 7*7 }}" in elements.text and not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page.html)


def test_the_policy_allows_the_pages_own_script_and_style_alone() -> None:
    html = render_page("x", sections=[]).html
    policy = next(at["content"] or "" for tag, at in Elements(html).tags if at.get("http-equiv"))
    for block, rule in (("style", "style-src"), ("script", "script-src")):
        content = html.split(f"<{block}>", 1)[1].split(f"</{block}>", 1)[0]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy


def test_data_for_the_script_cannot_end_it() -> None:
    value = {HOSTILE: [HOSTILE, float("nan"), float("inf"), 0.1]}
    text = script_json(value)
    assert not set("<>&\u2028\n") & set(text)
    assert json.loads(text) == {HOSTILE: [HOSTILE, None, None, 0.1]}


def test_too_many_pictures_become_smaller_until_the_page_is_below_its_limit() -> None:
    pictures = [PagePicture(f"p{n}", "", "", [PageImage(png(side=900, noise=True))]) for n in range(4)]
    assert sum(len(each.images[0].raster) for each in pictures) > 1.9 * MOST_BYTES
    page = render_page("x", sections=[PageSection("x", pictures)])
    assert len(page.html.encode()) < MOST_BYTES and page.notes == ()
    assert page.html.count("<img ") == 4 and "data:image/webp" in page.html


LONG = "\u202e&" * 30_000
CHART = DrawnChart("0", "c", "", "", "<svg></svg>" * 9000, ())


@pytest.mark.parametrize(
    ("block", "count", "said"),
    [
        (PageTable(("a", "b"), [("x" * 16_000, 1.5)] * 1200, title="t"), 1, "of its 1,200 rows"),
        (PageTable(("a", "b"), [("&" * 300, 1.5)] * 50_000, title="t"), 1, "of its 50,000 rows"),
        (PageTable(("a",) * 100_000, [(1,) * 100_000], title="t"), 1, "no room"),
        (PageTable(("a", LONG), [(LONG, 1)], title=LONG, caption=LONG), 9, "no room"),
        (PageText(20 * LONG, title="t"), 2, "no room"),
        (PagePicture(LONG, LONG, LONG, [PageImage(png())] * 60), 2, "no room"),
        (ChartBlock("t", (CHART,) * 20, {"key": "k", "charts": [{"label": "<" * 300}] * 20}), 4, "no room"),
    ],
)
def test_a_page_is_below_its_limit_whatever_a_run_holds_and_says_what_was_left_out(
    block: PageBlock, count: int, said: str
) -> None:
    page = render_page("x", sections=[PageSection("y", [block] * count), PageSection("x", [PageText("the end")])])
    assert len(page.html.encode()) < MOST_BYTES and "the end" in page.html
    assert any(said in note for note in page.notes) and said in page.html


def test_a_page_has_not_too_many_notes() -> None:
    assert len(render_page("x", sections=[], notes=[LONG] * 1000).html.encode()) < MOST_BYTES


def test_a_damaged_picture_is_named_and_the_others_are_shown() -> None:
    torn = PagePicture("torn", "", "", [PageImage(png(side=64, noise=True)[:900])])
    page = render_page("x", sections=[PageSection("x", [torn, PagePicture("good", "", "", [PageImage(png())])])])
    assert page.html.count("<img ") == 1
    assert len(page.notes) == 1 and "torn" in page.notes[0]


def test_numbers_are_short() -> None:
    assert [show_number(each) for each in (0.98125, 51200, 1e-9, 12.5, float("nan"), 0.0, -3)] == [
        "0.9812", "51,200", "1e-09", "12.5", "nan", "0", "-3"
    ]  # fmt: skip

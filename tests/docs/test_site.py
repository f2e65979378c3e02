"""The site as `make docs` builds it: without a warning, whole, offline, and readable in a browser at any width."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import shardvit
from tests.conftest import ROOT
from tests.launch.report.browser import Browser, font_config, open_browser, program

CONFIG = ROOT / ".ci" / "site" / "mkdocs.yml"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="the extra dev is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built where no network can be reached."""
    folder = tmp_path_factory.mktemp("site")
    nowhere = "http://127.0.0.1:9"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", CONFIG, "-d", folder],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "http_proxy": nowhere, "https_proxy": nowhere},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


class Links(HTMLParser):
    """What a page loads by itself, and where its links lead."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "a":
            self.links.append(named.get("href") or "")
        elif address := named.get("src") or (named.get("href") if tag == "link" else None):
            self.loaded.append(address)


def test_every_page_and_file_is_there_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]  # that one is for a server
    assert len(pages) > 20
    for page in pages:
        found = Links(page)
        for address in [*found.loaded, *found.links]:
            if not address.startswith(("data:", "#")) and (address in found.loaded or ":" not in address):
                assert (page.parent / address.partition("#")[0]).exists(), (page.name, address)


@pytest.mark.parametrize("name", shardvit.__all__)
def test_the_reference_has_every_public_name(site: Path, name: str) -> None:
    page = (site / "api-reference.html").read_text(encoding="utf-8")
    assert f'id="shardvit.{name}"' in page


def test_what_lies_outside_docs_is_shown(site: Path) -> None:
    assert "Where do I" in (site / "contributing.html").read_text(encoding="utf-8")
    assert "vit_l16_in21k" in (site / "recipe-list.html").read_text(encoding="utf-8")
    record = (site / "files" / "launch" / "bench" / "records" / "data.txt.html").read_text(encoding="utf-8")
    assert "webdataset" in record


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium, folder = program(), tmp_path_factory.mktemp("browser")
    if chromium is None:
        pytest.skip("no Chromium is installed")
    fonts = font_config("DejaVu", folder)  # without any, this Chromium dies of some pages
    if fonts is None:
        pytest.skip("the fonts DejaVu are not installed")
    with open_browser(chromium, folder, fonts=fonts) as browser:
        # the colours that a page was last seen in, which it keeps
        browser.call("Page.addScriptToEvaluateOnNewDocument", source="localStorage.clear()")
        yield browser


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_open_from_the_disk(site: Path, browser: Browser, width: int, scheme: str) -> None:
    for page in sorted({*site.glob("*.html")} - {site / "404.html"}):
        browser.open(page, width=width, scheme=scheme)
        assert browser.said == [], page.name
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth"), page.name
        colour = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", colour)[:3])) < 80) == (scheme == "dark"), page.name


def test_the_search_finds_a_word_without_a_server(site: Path, browser: Browser) -> None:
    browser.open(site / "index.html", width=1280)
    found = browser.run(
        """(async () => {
          document.getElementById("__search").click();
          const field = document.querySelector("[data-md-component=search-query]");
          field.value = "adafactor";
          field.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
          for (let i = 0; i < 300; i++) {
            const links = [...document.querySelectorAll(".md-search-result__link")].map(each => each.href);
            if (links.length) return links;
            await new Promise(done => setTimeout(done, 100));
          }
          return [];
        })()"""
    )
    assert any("recipes.html" in link for link in found)
    assert browser.said == []

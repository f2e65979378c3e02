"""Pages in a real Chromium, with no fonts, DejaVu's and Liberation's: whole at a desktop's and a phone's width, light
and dark, on paper, with and without their script; hovering, zooming and sorting work, nothing of a hostile run runs.
Skipped where there is no Chromium, or where the fonts of a set are not here."""

import base64
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from shardvit.launch.pages.sections import write_runs
from shardvit.pipeline.runs.read import read_run
from tests.launch.report.browser import FONT_SETS, Browser, font_config, open_browser, program
from tests.launch.report.runs import HOSTILE, make_hostile, make_run

WIDTHS = (1280, 390)
# Pictures that are not whole, plots without a line or axes, what is wider than the page, texts over the edge.
PROBLEMS = """(() => {
  const found = [];
  for (const image of document.images) if (!image.complete || !image.naturalWidth) found.push("broken " + image.alt);
  for (const image of document.images) if (!image.alt) found.push("no words for a picture");
  for (const plot of document.querySelectorAll("svg.plot")) {
    const lines = [...plot.querySelectorAll("path.line")].filter(each => /L|M/.test(each.getAttribute("d")));
    if (!lines.length) found.push("empty plot " + plot.getAttribute("aria-label"));
    if (plot.querySelectorAll("text").length < 3) found.push("no axes " + plot.getAttribute("aria-label"));
    for (const text of plot.querySelectorAll("text")) {
      const box = text.getBBox(), view = plot.viewBox.baseVal;
      if (box.width && (box.x < -1 || box.x + box.width > view.width + 1)) found.push("cut off: " + text.textContent);
      for (const other of plot.querySelectorAll("text")) {
        const at = other.getBBox();
        if (other !== text && box.width && at.width && box.x < at.x + at.width && at.x < box.x + box.width &&
            box.y + 3 < at.y + at.height && at.y + 3 < box.y + box.height)
          found.push("one over the other: " + text.textContent + ", " + other.textContent);
      }
    }
  }
  if (document.documentElement.scrollWidth > window.innerWidth) found.push("scrolls sideways");
  for (const element of document.querySelectorAll("h1, h2, h3, p, figcaption, pre, img, li"))
    if (element.getBoundingClientRect().right > window.innerWidth + 1 && !element.closest(".scroll, pre"))
      found.push("over the edge: " + element.tagName + " " + element.textContent.slice(0, 60));
  return found;
})()"""


OPEN_ALL = "document.querySelectorAll('details').forEach(each => { each.open = true; })"


def opened(font_set: str, folder: Path) -> AbstractContextManager[Browser]:
    chromium, fonts = program(), font_config(font_set, folder)
    if chromium is None:
        pytest.skip("no Chromium is installed")
    if fonts is None:
        pytest.skip(f"the fonts {font_set} are not installed")
    return open_browser(chromium, folder, fonts=fonts)


@pytest.fixture(scope="module", params=FONT_SETS)
def browser_with_fonts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with opened(request.param, tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with opened("no fonts", tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    one = make_run(root, "one")
    other = make_run(root, "other", overrides=("seed=1", "stages.pretrain.optimizer.lr=0.001"))
    hostile = make_run(root, "hostile", words=HOSTILE)
    make_hostile(hostile)
    made = {name: [read_run(folder)] for name, folder in (("one", one), ("hostile", hostile))}
    made["three"] = [read_run(folder) for folder in (one, other, hostile)]
    return {name: write_runs(histories, output=root / f"{name}.html") for name, histories in made.items()}


def is_dark(browser: Browser) -> bool:
    paper = browser.run("getComputedStyle(document.documentElement).backgroundColor")
    return max(map(int, paper[4:-1].split(","))) < 60


@pytest.mark.parametrize("name", ["one", "hostile", "three"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_is_whole(browser_with_fonts: Browser, pages: dict[str, Path], name: str, width: int) -> None:
    browser = browser_with_fonts
    browser.open(pages[name], width=width)
    browser.run(OPEN_ALL)
    assert browser.run("document.querySelectorAll('svg.plot').length") >= 10
    assert browser.run("document.images.length") >= 4
    assert browser.run(PROBLEMS) == []
    assert browser.said == []
    assert browser.run("window.hit") is None
    assert not is_dark(browser)


@pytest.mark.parametrize("name", ["one", "hostile"])
def test_in_the_dark_scheme_a_page_is_dark_and_whole(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name], width=390, scheme="dark")
    browser.run(OPEN_ALL)
    assert is_dark(browser) and browser.run(PROBLEMS) == browser.said == []


def test_nothing_of_a_hostile_run_runs_or_leaves_the_page(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["hostile"], width=1280)
    text = browser.run("document.body.textContent")
    assert "window.hit=1" in text and "\\x1b[2J" in text and "{{ 7*7 }}" in text
    assert browser.run("document.querySelectorAll('script').length") == 2
    assert (
        browser.run("[...document.querySelectorAll('*')].some(e => [...e.attributes].some(a => /^on/.test(a.name)))")
        is False
    )
    # What gets in all the same is stopped by the policy.
    browser.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hit=8\">')")
    browser.run("const s = document.createElement('script'); s.textContent = 'window.hit=9'; document.body.append(s)")
    browser.run("new Promise(done => setTimeout(done, 100))")
    assert browser.run("window.hit") is None
    assert any("Content Security Policy" in each for each in browser.said)


def test_without_its_script_a_page_shows_the_same_curves(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"], width=390, script=False)
    root = browser.call("DOM.getDocument")["root"]["nodeId"]
    paths = browser.call("DOM.querySelectorAll", nodeId=root, selector="svg.plot path.line")["nodeIds"]
    assert len(paths) >= 10
    assert browser.call("DOM.querySelectorAll", nodeId=root, selector=".tools:not([hidden])")["nodeIds"] == []
    browser.call("Emulation.setScriptExecutionDisabled", value=False)


def box(browser: Browser, selector: str) -> tuple[float, float, float, float]:
    """Left, top, width and height of an element that is scrolled into sight."""
    found = browser.run(
        f"(() => {{ const e = document.querySelector('{selector}'); e.scrollIntoView({{block: 'center', behavior: "
        "'instant'}); const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
    )
    return found[0], found[1], found[2], found[3]


PLOT = '.charts[data-group="pretrain-1"] figure[data-chart="0"] svg.plot'
READOUT = f"document.querySelector('{PLOT}').parentElement.querySelector('.readout').textContent"
WHOLE_RANGE = f"document.querySelector('{PLOT}').closest('.charts').querySelector('.reset').disabled"


def test_a_cursor_shows_the_values_where_it_is(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"], width=1280)
    browser.run(OPEN_ALL)
    left, top, width, height = box(browser, PLOT)
    browser.mouse("mouseMoved", left + width / 2, top + height / 2)
    said = browser.run(READOUT)
    assert "training" in said and "held out" in said and "step" in said and "images" in said
    others = browser.run(
        "[...document.querySelectorAll('.charts[data-group=\"pretrain-1\"] .readout')].map(e => e.textContent)"
    )
    assert all(others), "all charts of a stage follow the cursor"
    browser.mouse("mouseMoved", 2, 2)
    assert browser.run(READOUT) == ""


def test_dragging_zooms_and_a_double_click_goes_back(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"], width=1280)
    browser.run(OPEN_ALL)
    ticks = f"[...document.querySelectorAll('{PLOT} text')].map(e => e.textContent).join('|')"
    static = browser.run(ticks)
    left, top, width, height = box(browser, PLOT)
    y = top + height / 2
    browser.mouse("mouseMoved", left + width * 0.3, y)
    whole = browser.run(ticks)
    assert whole == static, "the script draws the chart as the page has it"
    browser.mouse("mousePressed", left + width * 0.3, y, count=1)
    browser.mouse("mouseMoved", left + width * 0.5, y, count=1)
    browser.mouse("mouseReleased", left + width * 0.5, y, count=1)
    assert browser.run(ticks) != whole
    assert browser.run(WHOLE_RANGE) is False
    for count in (1, 2):
        browser.mouse("mousePressed", left + width * 0.5, y, count=count)
        browser.mouse("mouseReleased", left + width * 0.5, y, count=count)
    assert browser.run(ticks) == whole
    assert browser.said == []


def test_the_keyboard_moves_the_cursor_and_zooms(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"], width=1280)
    browser.run(OPEN_ALL)
    browser.run(f"document.querySelector('{PLOT}').focus()")
    places = []
    for _ in range(2):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight", code="ArrowRight")
        places.append(browser.run(READOUT))
    assert all(places) and places[0] != places[1]
    for key, is_whole in (({"key": "+", "text": "+"}, False), ({"key": "Escape", "code": "Escape"}, True)):
        browser.call("Input.dispatchKeyEvent", type="keyDown", **key)
        assert browser.run(WHOLE_RANGE) is is_whole


def test_the_x_axis_can_be_time_or_steps(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["three"], width=1280)
    browser.run(OPEN_ALL)
    group = '.charts[data-group="pretrain-3"]'
    labels = f"[...document.querySelectorAll('{group} svg.plot .label')].map(e => e.textContent)"
    names = set(browser.run(labels))
    for value in ("t", "s", "i"):
        browser.run(f"document.querySelector('{group} input[value={value}]').click()")
        now = set(browser.run(labels))
        assert len(now) == 1 and (now == names) == (value == "i")
    assert browser.run(PROBLEMS) == []


def test_tables_are_sorted_by_a_click_and_earlier_pictures_found(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"], width=1280)
    table = "[...document.querySelectorAll('table')].find(each => each.tHead.textContent.includes('images seen'))"
    column = f"[...{table}.tBodies[0].rows].map(row => row.cells[2].textContent)"
    browser.run(f"{table}.tHead.rows[0].cells[2].querySelector('button').click()")
    assert browser.run(column) == ["51,200", "3,200", ""]
    browser.run(f"{table}.tHead.rows[0].cells[2].querySelector('button').click()")
    assert browser.run(column) == ["3,200", "51,200", ""]
    shown = "[...document.querySelector('.steps').parentElement.querySelectorAll('img')].map(e => !e.hidden)"
    assert browser.run(shown) == [False, True]
    browser.run("const r = document.querySelector('.steps input'); r.value = 0; r.dispatchEvent(new Event('input'))")
    assert browser.run(shown) == [True, False]


def test_results_and_the_last_stage_are_open_and_every_fold_has_a_name_of_its_own(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["one"], width=1280)
    folds = browser.run(
        "[...document.querySelectorAll('main > details')].map(e => [e.querySelector('h2').textContent, e.open])"
    )
    assert folds[:3] == [["Results", True], ["finetune", True], ["pretrain", False]]
    assert not any(is_open for _, is_open in folds[3:])
    titles = browser.run(
        "[...document.querySelectorAll('.part > summary, .picture h4, .table h4')].map(e => e.textContent)"
    )
    assert len(set(titles)) == len(titles) > 10
    sets = {
        "Held-out set digits-transfer/val, finetune",
        "Held-out set other, finetune",
        "Held-out set other, pretrain",
    }
    assert sets <= set(titles)
    assert not any("class_scores" in title for title in titles), "the table of classes says the same"
    as_it_opens = browser.run("document.documentElement.scrollHeight")
    browser.run("document.querySelector('.contents a[href=\"#s3\"]').click()")
    assert browser.run("document.querySelector('#s3').closest('details').open")
    assert browser.run("document.documentElement.scrollHeight") > 1.2 * as_it_opens


@pytest.mark.parametrize("width", [1280, 1920])
def test_a_wide_window_is_used_to_its_right_edge(browser: Browser, pages: dict[str, Path], width: int) -> None:
    browser.open(pages["one"], width=width)
    browser.run(OPEN_ALL)
    right = "Math.max(...[...e.querySelectorAll(':scope > div figure')].map(f => f.getBoundingClientRect().right))"
    folds = f"[...document.querySelectorAll('main > details')].filter(e => e.querySelector('figure')).map(e => {right})"
    edges = browser.run(folds)
    assert len(edges) >= 3 and min(edges) > 0.9 * width
    pictures = "[...document.querySelectorAll('.gallery')].map(e => new Set([...e.querySelectorAll(':scope > *')]"
    columns = browser.run(f"{pictures}.map(f => f.getBoundingClientRect().left)).size)")
    assert max(columns) >= 2


@pytest.mark.parametrize("script", [True, False])
def test_on_paper_all_folds_are_open(browser: Browser, pages: dict[str, Path], script: bool) -> None:
    def sheets() -> int:
        return len(re.findall(rb"/Type\s*/Page\b", base64.b64decode(browser.call("Page.printToPDF")["data"])))

    browser.open(pages["one"], width=1280)
    browser.run(OPEN_ALL)
    whole = sheets()
    browser.open(pages["one"], width=1280, script=script)
    assert sheets() == whole > 3
    browser.call("Emulation.setScriptExecutionDisabled", value=False)

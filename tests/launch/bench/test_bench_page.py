"""The benches' page names every bench and record, and quotes the records word for word."""

import ast
import re

from tests.conftest import ROOT

FOLDER = ROOT / "launch/bench"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")


def commands() -> set[str]:
    """The modules that a user runs, by their own words; the others are their parts."""
    docs = {path.stem: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in FOLDER.glob("*.py")}
    return {
        name
        for name, text in docs.items()
        if text
        and "Started as" not in text
        and f"python -m shardvit.launch.bench.{name} " in re.sub(r"[\s`]+", " ", text)
    }


def test_every_bench_is_shown_with_its_command_and_every_record_is_linked():
    assert len(commands()) >= 10
    assert commands() == set(re.findall(r"python -m shardvit\.launch\.bench\.(\w+)", PAGE))
    linked = set(re.findall(r"\]\(records/([\w.]+)\)", PAGE))
    assert linked == {path.name for path in (FOLDER / "records").iterdir()}


def test_each_quoted_line_is_one_of_the_record_named_before_it():
    quoted = 0
    for block in re.finditer(r"^```\n(.*?)^```$", PAGE, re.M | re.S):
        record = re.findall(r"\(records/(\w+\.txt)\)", PAGE[: block.start()])[-1]
        known = (FOLDER / "records" / record).read_text(encoding="utf-8").splitlines()
        lines = block[1].splitlines()
        assert [line for line in lines if line not in known] == [], record
        quoted += len(lines)
    assert quoted > 5


def test_the_page_is_short():
    assert len(PAGE.splitlines()) <= 130

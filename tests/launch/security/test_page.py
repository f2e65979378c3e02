"""SECURITY.md says what the attacks' table says, in the same words; what is tested elsewhere is there."""

import re
from pathlib import Path

from tests.launch.security.attacks import ROWS
from tests.launch.security.test_attacks import ARGUMENTS

ROOT = Path(__file__).resolve().parents[3]


def rows_of_page() -> list[tuple[str, ...]]:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    table = text.partition("<!-- rows: begin -->")[2].partition("<!-- rows: end -->")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[2:]]


def test_the_page_and_the_tests_have_the_same_rows():
    assert rows_of_page() == [(row.kind, ", ".join(row.commands), row.outcome) for row in ROWS]


def test_every_command_of_the_table_is_tried_or_its_test_is_named():
    for row in ROWS:
        for command in row.commands:
            assert command in row.elsewhere or command in {*ARGUMENTS, "load_run"}
        for place in row.elsewhere.values():
            file, _, name = place.partition(": ")
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), place


def test_the_page_is_one():
    assert len((ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines()) <= 100

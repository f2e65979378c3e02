"""`measured`: compares with an oracle and remembers by how much it differed, for the table in docs/numerics.md.

pytest tests/oracles --table docs/numerics.md       writes the rows between the table's two marks
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.model.comparing import relative_difference

Measured = Callable[..., None]
Row = tuple[str, str, str]  # semantic, oracle, what was compared

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
_rows = pytest.StashKey[dict[Row, tuple[float, float]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The file that has the table."""
    parser.addoption("--table", type=Path, default=None, help="Markdown file whose table of differences is rewritten.")


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Measured:
    """`measured(semantic, oracle, what, ours, theirs, below=1e-5)`: the largest difference over the largest value of
    theirs must be `below`."""
    rows = request.config.stash.setdefault(_rows, {})

    def compare(semantic: str, oracle: str, what: str, ours: Any, theirs: Any, *, below: float = 1e-5) -> None:
        difference = relative_difference(ours, theirs)
        assert difference < below, f"{semantic}: {what} differ from {oracle}'s by {difference:.2e}, allowed {below:.0e}"
        worst, _ = rows.get((semantic, oracle, what), (0.0, below))
        rows[semantic, oracle, what] = (max(worst, difference), below)

    return compare


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the table, if asked to and if nothing failed."""
    path, rows = session.config.getoption("--table"), session.config.stash.get(_rows, {})
    if path is None or session.testsfailed:
        return
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    assert rest, f"{path} has no {BEGIN}"
    lines = ["| semantic | oracle | compared | measured | allowed |", "|---|---|---|---|---|"]
    lines += [
        f"| {semantic} | {oracle} | {what} | {'0' if worst == 0 else f'{worst:.1e}'} | {below:.0e} |"
        for (semantic, oracle, what), (worst, below) in sorted(rows.items())
    ]
    text = "\n".join(lines)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")

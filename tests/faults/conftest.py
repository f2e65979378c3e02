"""The fault suite's fixtures, and the table at its end.

All rows are marked `faults`, which `make test` leaves out, but for those marked `fast`. `--faults-table FILE` keeps
the table, with each row's promise.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import Case, pack_shards
from tests.faults.rows import Row, table

HERE = Path(__file__).parent
ROWS = pytest.StashKey[list[Row]]()

Undisturbed = Callable[..., Case]
NewCase = Callable[..., Case]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest tests/faults --faults-table FILE`."""
    parser.addoption("--faults-table", default=None, metavar="FILE", help="write the fault suite's table to FILE")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is not `fast` belongs to `make faults` alone."""
    for item in items:
        if HERE in item.path.parents and not item.get_closest_marker("fast"):
            item.add_marker(pytest.mark.faults)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A row has passed if its test has, and if it answered every question."""
    outcome: Any = yield
    row = getattr(item, "funcargs", {}).get("row")
    if isinstance(row, Row) and call.when == "call":
        report = outcome.get_result()
        row.verdict = {"passed": "passed", "skipped": "skipped"}.get(report.outcome, "FAILED")
        row.seconds = call.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table; write it to --faults-table's file."""
    rows = config.stash.get(ROWS, [])
    if not rows:
        return
    lines = table(rows)
    passed = sum(row.verdict == "passed" for row in rows)
    total = f"{passed} of {len(rows)} faults survived, in {sum(row.seconds for row in rows) / 60:.1f} minutes"
    terminalreporter.section("faults")
    for line in [*lines, total]:
        terminalreporter.write_line(line)
    file = config.getoption("--faults-table", None)
    if file:
        promises = dict.fromkeys(row.promise for row in rows)
        from shardvit.launch.bench.measure import heading

        text = [heading("torch", "deepspeed"), "", *lines, "", total, "", *promises]
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text("\n".join(text) + "\n", encoding="utf-8")


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Iterator[Row]:
    """The test's line of the table."""
    line = Row(name=request.node.name)
    request.config.stash.setdefault(ROWS, []).append(line)
    yield line
    if line.verdict == "passed" and line.unanswered():
        line.verdict = "FAILED"
        pytest.fail(f"the row says nothing about: {', '.join(line.unanswered())}")


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_shards(tmp_path_factory.mktemp("shards") / "digits")


@pytest.fixture
def new_case(tmp_path: Path, shards: Path) -> Iterator[NewCase]:
    """`new_case(changes={...})`: a run folder; what it has left running is killed after the test."""
    cases: list[Case] = []

    def make(name: str = "case", **settings: Any) -> Case:
        cases.append(Case(tmp_path / name, shards, **settings))
        return cases[-1]

    yield make
    for case in cases:
        for process in case.processes():
            process.kill()


@pytest.fixture
def case(new_case: NewCase) -> Case:
    """A run folder with the suite's recipe."""
    return new_case()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Undisturbed:
    """`undisturbed(changes={...})`: the run that nothing happened to; each is done once a session."""
    done: dict[str, Case] = {}

    def make(changes: Mapping[str, object] | None = None, *, how: str = "srun") -> Case:
        key = repr((sorted((changes or {}).items()), how))
        if key not in done:
            case = Case(tmp_path_factory.mktemp("undisturbed") / "case", shards, changes=changes)
            ended = case.start(how=how).wait()  # pyright: ignore[reportArgumentType]
            assert ended.code == 0, ended.output
            assert case.record()["state"] == "done"
            done[key] = case
        return done[key]

    return make

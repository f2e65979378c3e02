"""`pytest --suite-record FILE`: what became of the tests, a line per room, with where, when and on what they ran.

`.ci/matrix` reads the first and the last line. A session that was stopped writes nothing.
"""

import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

# A category of pytest's summary -> the column that it counts in.
COLUMNS = {"passed": "passed", "failed": "failed", "error": "failed", "unstable": "unstable", "skipped": "skipped"}
_START = pytest.StashKey[float]()
_FORM = "{:<32}" + "{:>10}" * 5


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest --suite-record FILE`."""
    parser.addoption("--suite-record", metavar="FILE", help="write how many tests of each room passed to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """The clock starts; a folder that cannot be made is told now rather than in the end."""
    config.stash[_START] = time.monotonic()
    if file := config.getoption("--suite-record"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    """Write the file, once all is counted."""
    file = config.getoption("--suite-record")
    if file is None or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: Counter[str] = Counter()
    for category, reports in terminalreporter.stats.items():
        for report in reports:
            if not isinstance(report, pytest.TestReport | pytest.CollectReport):  # a warning
                continue
            room = _room(report.nodeid)
            seconds[room] += getattr(report, "duration", 0.0)
            if category in COLUMNS:
                counts[room][COLUMNS[category]] += 1
    total = sum(counts.values(), Counter())
    elapsed = time.monotonic() - config.stash[_START]
    selection = f'pytest -m "{config.option.markexpr}" {" ".join(config.args)}'
    from shardvit.launch.bench.measure import heading

    lines = [
        heading("torch", "torchvision", "deepspeed"),
        f"{selection}, {config.option.numprocesses or 1} at a time; minutes: added up, in the last line elapsed",
        "",
        _FORM.format("room", *dict.fromkeys(COLUMNS.values()), "minutes"),
        *(_line(room, counts[room], seconds[room]) for room in sorted(counts)),
        _line("all", total, elapsed),
    ]
    Path(file).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _room(nodeid: str) -> str:
    """The folder of a test's file, two levels deep at most: `pipeline/recipe`."""
    folders = nodeid.partition("::")[0].removeprefix("tests/").split("/")[:-1]
    return "/".join(folders[:2]) or "tests"


def _line(name: str, counts: Counter[str], seconds: float) -> str:
    return _FORM.format(name, *(counts[column] for column in dict.fromkeys(COLUMNS.values())), f"{seconds / 60:.1f}")

"""pytest plugin: append what becomes of each test to a file of JSON lines, at once, so that a crash loses nothing.

Used by `launch.bench.acceptance` as `-p shardvit.launch.bench.acceptance_lines --lines FILE`. First the tests that were
selected, then for each one `start` and `end`. A test's recorded properties are its `shown` values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

_MOST_REASON, _MOST_DETAILS = 400, 12_000  # characters


def pytest_addoption(parser: pytest.Parser) -> None:
    """Name the file."""
    parser.addoption("--lines", type=Path, help="of launch.bench.acceptance: where to append JSON lines")
    parser.addoption("--one-failure", action="store_true", help="stop after a test that fails; files do not count")


def pytest_configure(config: pytest.Config) -> None:
    """Write there."""
    if file := config.getoption("--lines"):
        stops = "at a failure" if config.getoption("--one-failure") else "never"
        config.pluginmanager.register(_Lines(file, stops=stops))


class _Lines:
    def __init__(self, file: Path, *, stops: Literal["at a failure", "never"]) -> None:
        self._file, self._stops = file, stops
        self._worst: dict[str, Any] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            details = report.longreprtext[-_MOST_DETAILS:]
            reason = f"cannot be read: {details.splitlines()[-1]}"[:_MOST_REASON]
            self._write(event="end", test=report.nodeid, status="fail", reason=reason, details=details)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._session = session
        self._write(event="selected", tests=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._worst = {"status": "not run", "reason": "pytest ran no part of it"}
        self._write(event="start", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._worst = {"status": "fail", "reason": _reason(report), "details": report.longreprtext[-_MOST_DETAILS:]}
        elif report.skipped:
            self._worst = {"status": "not run", "reason": _why_skipped(report)}
        elif report.when == "call":
            shown = ", ".join(f"{name} {value}" for name, value in report.user_properties)
            self._worst = {"status": "pass", "shown": shown}

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(event="end", test=nodeid, **self._worst)
        if self._worst["status"] == "fail" and self._stops == "at a failure":
            self._session.shouldstop = self._stops

    def _write(self, **content: Any) -> None:
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(content) + "\n")


def _reason(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else report.longreprtext
    return f"{'' if report.when == 'call' else f'{report.when}: '}{' '.join(text.split())}"[:_MOST_REASON]


def _why_skipped(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return text.removeprefix("Skipped: ")[:_MOST_REASON]

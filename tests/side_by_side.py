"""Two halves of the tests side by side (pytest-xdist): which tests stay together, and which begin."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Without the group that xdist hangs on: `test_it.py::test_it[1]@group` is no id that pytest takes."""
    node_id, found, group = report.nodeid.rpartition("@")
    if found and hasattr(report, "node") and "]" not in group and "::" not in group:
        report.nodeid = node_id

"""Two halves of the tests side by side (pytest-xdist, `--dist loadgroup`): what stays together, and what begins.

The tests of one file stay together, and so what their fixtures share is made once; the files of one folder in TOGETHER
share a fixture of the session. Anything else that a test looks at (processes, ports, shared memory, folders for
temporary files) it must know to be its own by a mark, so that any two files can run at the same time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TOGETHER = ("faults",)  # the runs that nothing happened to
# The longest of them, longest first; what is short fills the gaps at the end, and both halves end together.
FIRST = (
    "integration/test_masked_patch.py",
    "cluster/test_queue.py",
    "integration/test_pipeline.py",
    "cluster/hosts/test_stage_hosts.py",
    "distributed/test_watch_processes.py",
    "faults",
    "distributed/test_elastic.py",
    "integration/test_damaged_shards.py",
    "integration/test_remote_shards.py",
    "data_shards/test_workers.py",
    "distributed/test_engines.py",
    "integration/test_models_from_elsewhere.py",
    "model/formats/test_export.py",
    "data_shards/test_assemble.py",
    "launch/test_table8.py",
    "cluster/hosts/test_preflight_hosts.py",
    "launch/test_bench_data.py",
    "launch/hosts/test_agent.py",
)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker, give every test its group, and bring them into order."""
    if not hasattr(config, "workerinput"):
        return
    places = {name: place for place, name in enumerate(FIRST)}
    order: dict[str, int] = {}
    for item in items:
        group = group_of(item.path)
        order.setdefault(group, places.get(group, len(FIRST) + len(order)))
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: order[group_of(item.path)])  # stable: a file's tests stay as they are


def group_of(path: Path) -> str:
    """The name of the group that a test file is in."""
    if not path.is_relative_to(TESTS):
        return str(path)
    name = path.relative_to(TESTS)
    return name.parts[0] if name.parts[0] in TOGETHER else name.as_posix()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Without the group that xdist hangs on: `test_it.py::test_it[1]@group` is no id that pytest takes."""
    node_id, found, group = report.nodeid.rpartition("@")
    if found and hasattr(report, "node") and "]" not in group and "::" not in group:
        report.nodeid = node_id

"""Two halves of the tests side by side (pytest-xdist, `--dist loadfile`): what stays together, and what begins.

The tests of one file stay together, and so what their fixtures share is made once; the files of one folder in TOGETHER
share a fixture of the session. Anything else that a test looks at (processes, ports, shared memory, folders for
temporary files) it must know to be its own by a mark, so that any two files can run at the same time.
"""

from typing import Any

import pytest

TOGETHER = ("faults", "integration")  # the runs that nothing happened to; the process that is forked
# The longest of them, longest first; what is short fills the gaps at the end, and both halves end together.
FIRST = (
    "integration",
    "faults",
    "oracles/test_timm_training.py",
    "launch/report/test_browser.py",
    "launch/test_launchers.py",
    "cluster/test_training.py",
    "cluster/hosts/test_train_hosts.py",
    "oracles/test_flop_counter.py",
    "distributed/test_equality.py",
    "cluster/test_queue.py",
    "oracles/test_flax_vit.py",
    "cluster/hosts/test_stage_hosts.py",
    "model/formats/test_programs.py",
    "distributed/test_elastic.py",
    "oracles/test_google_training.py",
    "oracles/test_flax_hybrid.py",
    "distributed/test_watch_processes.py",
    "pipeline/budget/test_memory_tracker.py",
    "pipeline/checkpoint/test_saver_faults.py",
    "distributed/test_engines.py",
    "pipeline/optimizers/test_optimizer_oracles.py",
    "oracles/test_flax_trajectory.py",
    "pipeline/using/test_find_model.py",
    "oracles/test_npz_oracles.py",
    "oracles/test_flax_init.py",
    "pipeline/tracking/test_mlflow_sink.py",
    "data_shards/loading/test_workers.py",
    "pipeline/ranks/test_group.py",
    "oracles/test_flax_resnet.py",
    "model/formats/test_export.py",
    "pipeline/tracking/test_client.py",
    "data_shards/loading/test_assemble.py",
    "pipeline/checkpoint/test_killed_anywhere.py",
    "cluster/hosts/test_preflight_hosts.py",
    "launch/bench/test_data.py",
    "launch/hosts/test_agent.py",
    "test_unstable.py",
)


def group_of(path: str) -> str:
    """The group of a test file, by its path relative to the repository or the start of its id."""
    name = path.partition("::")[0].removeprefix("tests/")
    folder = name.partition("/")[0]
    return folder if folder in TOGETHER else name


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """One process where a table is written of what all tests have measured."""
    if any(getattr(config.option, table, None) for table in ("table", "faults_table")):
        config.option.numprocesses = 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Bring the groups into order, where there are two halves."""
    if hasattr(config, "workerinput"):
        places = {name: place for place, name in enumerate(FIRST)}
        items.sort(key=lambda item: places.get(group_of(item.nodeid), len(FIRST)))  # stable


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `--dist loadfile`: like xdist's own, but with the groups and in the order of this file."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)

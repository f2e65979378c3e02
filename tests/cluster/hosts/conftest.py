"""Two hosts for a test, and a run on them; skipped with the reason where there can be none."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts.two_hosts import Difference, TwoHosts, why_not
from tests.faults.harness import Attempt, Case, Fault, pack_shards

NewHosts = Callable[..., TwoHosts]
HOSTFILE = "alpha slots=1\nbeta slots=1\n"


@pytest.fixture
def new_hosts(tmp_path: Path) -> Iterator[NewHosts]:
    """`new_hosts(beta=Difference(...))`: two hosts, taken down after the test."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made: list[TwoHosts] = []

    def make(beta: Difference | None = None) -> TwoHosts:
        made.append(TwoHosts(tmp_path / f"hosts-{len(made)}", beta=beta))
        made[-1].start()
        return made[-1]

    yield make
    for hosts in made:
        hosts.stop()


@pytest.fixture
def hosts(new_hosts: NewHosts) -> TwoHosts:
    """Two hosts that are alike."""
    return new_hosts()


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_shards(tmp_path_factory.mktemp("shards") / "digits")


@pytest.fixture
def new_case(tmp_path: Path, shards: Path) -> Iterator[Callable[..., Case]]:
    """`new_case(changes={...})`: a run folder; what it has left running is killed after the test."""
    cases: list[Case] = []

    def make(name: str = "case", **settings: Any) -> Case:
        cases.append(Case(tmp_path / name, shards, **settings))
        (cases[-1].folder / "hostfile").write_text(HOSTFILE)
        # Ranks that are alone on their host would take all its cores, and sum in another order than two on one.
        (cases[-1].folder / ".deepspeed_env").write_text("OMP_NUM_THREADS=1\n")
        return cases[-1]

    yield make
    for case in cases:
        for process in case.processes():
            process.kill()


@pytest.fixture
def case(new_case: Callable[..., Case]) -> Case:
    """A run folder with the suite's recipe."""
    return new_case()


def run_on(
    hosts: TwoHosts,
    case: Case,
    *arguments: str,
    faults: Sequence[Fault] = (),
) -> Attempt:
    """Start `shardvit run recipe.yaml --hostfile hostfile` on alpha."""
    return start_on(
        hosts,
        case,
        "-m",
        "shardvit.launch.cli",
        "run",
        "recipe.yaml",
        "--hostfile",
        "hostfile",
        *arguments,
        faults=faults,
    )


def start_on(hosts: TwoHosts, case: Case, *python_arguments: str, faults: Sequence[Fault] = ()) -> Attempt:
    """Start a Python on alpha in the case's folder, as somebody who is logged in there."""
    number = len(list(case.folder.glob("output-*.txt"))) + 1
    output = case.folder / f"output-{number}.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            hosts.on("alpha", sys.executable, *python_arguments, folder=case.folder),
            env={**case.environment(faults), **hosts.environment()},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Attempt(process, output=output, case=case, faults=faults)

"""The laws of an engine, on this machine's processes and on a Ray cluster of two nodes, one of which dies."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardvit.data_shards.engines.engine import LocalEngine, PartsEngine, local_engine, open_engine
from shardvit.data_shards.engines.ray_engine import RayEngine
from shardvit.data_shards.engines.threads import ThreadEngine, give_up_if_stopped
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.vocabulary import EngineName
from tests.conftest import python_path
from tests.data_shards.engines import parts
from tests.data_shards.opened import wait_until
from tests.data_shards.packing.folders import tree

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [
    # Ray's own: sockets and log files that it leaves to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
]
STORE = {"object_store_memory": 80_000_000}


@pytest.fixture(scope="module", autouse=True)
def _works_are_found() -> None:
    """Nodes' workers import the works of `parts` from here, whatever the caller's path."""
    os.environ["PYTHONPATH"] = python_path()


@pytest.fixture(scope="module")
def collected() -> Iterator[None]:
    """Ray's clients are destroyed here, as they would kill another test's forked process that destroys them."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def cluster(collected: None) -> Iterator[Any]:
    """A Ray cluster of two nodes, the driver's without CPUs."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    before = set(psutil.Process().children(recursive=True))
    made = cluster_utils.Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, **STORE},
        shutdown_at_exit=False,  # the hook would keep the clients
    )
    made.add_node(num_cpus=2, **STORE)
    yield made
    made.shutdown()
    left = [each for each in set(psutil.Process().children(recursive=True)) - before if "ray" in " ".join(_words(each))]
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture(params=["processes", "ray"])
def engine(request: pytest.FixtureRequest) -> Iterator[PartsEngine]:
    name: EngineName = request.param
    address = request.getfixturevalue("cluster").address if name == "ray" else None
    with open_engine(name, workers=2, address=address) as opened:
        yield opened


def test_results_are_by_part_and_arrive_one_by_one(engine: PartsEngine, tmp_path: Path):
    arrived: list[tuple[int, int]] = []
    found = engine.run(parts.square, tmp_path, list(range(20)), done=arrived.append)
    assert {part: square for part, (square, _) in found.items()} == {part: part * part for part in range(20)}
    assert sorted(arrived) == sorted(found.values())
    assert os.getpid() not in {process for _, process in found.values()}
    assert len(list(tmp_path.iterdir())) == 20  # each once
    assert engine.workers == 2


def test_a_part_whose_process_dies_twice_is_left_out_and_others_are_done(engine: PartsEngine, tmp_path: Path):
    found = engine.run(parts.dies, tmp_path, list(range(8)), done=lambda _: None)
    assert 3 not in found and len(list(tmp_path.glob("3-*"))) == 2
    if not isinstance(engine, LocalEngine):  # there part 5 may be tried first when it is alone
        assert found[5] == 5 and len(list(tmp_path.glob("5-*"))) == 2
    assert {part: found[part] for part in (0, 1, 2, 4, 6, 7)} == {part: part for part in (0, 1, 2, 4, 6, 7)}


def test_a_users_mistake_passes_as_itself(engine: PartsEngine):
    with pytest.raises(UserError, match="line 3") as caught:
        engine.run(parts.complains, None, list(range(8)), done=lambda _: None)
    assert type(caught.value) is UserError


def test_what_done_raises_ends_the_run(engine: PartsEngine, tmp_path: Path):
    def done(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.run(parts.square, tmp_path, list(range(500)), done=done)
    assert len(list(tmp_path.iterdir())) < 500


def test_a_node_that_dies_costs_its_unfinished_parts_and_one_that_joins_takes_some(cluster: Any, tmp_path: Path):
    second = cluster.add_node(num_cpus=2, **STORE)
    cluster.wait_for_nodes()
    arrived: list[int] = []

    def done(part: int) -> None:
        nonlocal second
        if not arrived:
            cluster.remove_node(second, allow_graceful=False)
            second = cluster.add_node(num_cpus=2, **STORE)
            (tmp_path / "go").write_text("")
        arrived.append(part)

    with open_engine("ray", address=cluster.address) as engine:
        assert engine.workers == 4
        found = engine.run(parts.waits, tmp_path, list(range(40)), done=done)
    cluster.remove_node(second)
    assert found == {part: part for part in range(40)} and sorted(arrived) == list(range(40))
    again = [part for part in range(40) if len(list(tmp_path.glob(f"{part}-*"))) > 1]
    assert 1 <= len(again) <= 2  # what ran on the node that died


def test_paths_that_a_node_does_not_have_are_named_with_it(cluster: Any, tmp_path: Path):
    missing = tmp_path / "photos"
    has_node = pytest.raises(UserError, match=r"photos: node \d+\.\d+\.\d+\.\d+ ")
    with open_engine("ray", address=cluster.address, seen_by_all=[missing]) as engine, has_node:
        engine.run(parts.square, tmp_path, [1, 2], done=lambda _: None)


def test_an_address_where_no_ray_answers_is_named():
    pytest.importorskip("ray")
    with pytest.raises(UserError, match=r"--address 127\.0\.0\.1:9: "), open_engine("ray", address="127.0.0.1:9"):
        pass


def test_without_ray_one_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'shardvit\[ray\]'"), open_engine("ray"):
        pass


def test_an_address_needs_ray():
    with pytest.raises(UserError, match="--engine ray"), open_engine(address="head:6379"):
        pass


IN_A_USERS_FOLDER = """
import json, os, pathlib, sys
from shardvit.data_shards.engines.engine import open_engine
from tests.data_shards.engines import parts

if __name__ == "__main__":
    folder = pathlib.Path.cwd() / "notes"
    folder.mkdir()
    with open_engine("ray", workers=2) as engine:
        told = engine.run(parts.tells, None, ["cwd", "shardvit"], done=lambda _: None)
        engine.run(parts.dies, folder, list(range(4)), done=lambda _: None)
        print(json.dumps([told, engine.workers]), flush=True)
        engine.run(parts.waits, folder, [7, 8], done=lambda _: None)
"""


def test_a_local_ray_is_silent_imports_nothing_of_the_working_folder_and_ends_with_ctrl_c(tmp_path: Path):
    pytest.importorskip("ray")
    for name in ("torch", "shardvit", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a user's own file')")
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "MARK": str(tmp_path)}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-c", IN_A_USERS_FOLDER]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        try:
            wait_until(lambda: len(list((tmp_path / "notes").glob("[78]-*"))) == 2 or child.poll() is not None)
            family = psutil.Process(child.pid).children(recursive=True)
            assert any("raylet" in " ".join(_words(each)) for each in family)
            child.send_signal(signal.SIGINT)
            said, complained = child.communicate(timeout=120)
        finally:
            child.kill()
    told, workers = json.loads(said)
    assert told["cwd"] == str(tmp_path)
    assert (ROOT / "shardvit" / "__init__.py").samefile(told["shardvit"])
    assert workers == 2
    assert complained.strip().endswith("KeyboardInterrupt")
    assert "ray" not in complained.partition("Traceback")[0]
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


FORKS_AFTERWARDS = """
import gc, os
from shardvit.data_shards.engines.engine import open_engine

gc.disable()  # what Ray leaves is collected in the child, as in a DataLoader's worker
with open_engine("ray", workers=1):
    pass
if (child := os.fork()) == 0:
    gc.collect()
    os._exit(0)
raise SystemExit(os.waitpid(child, 0)[1])
"""


def test_a_process_that_is_forked_afterwards_lives():
    pytest.importorskip("ray")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    assert subprocess.run([sys.executable, "-c", FORKS_AFTERWARDS], env=environment, check=False).returncode == 0


def test_a_folder_that_other_nodes_see_is_left_as_it_was(cluster: Any, tmp_path: Path):
    seen, notes = tmp_path / "photos", tmp_path / "notes"
    seen.mkdir()
    notes.mkdir()
    with open_engine("ray", address=cluster.address, seen_by_all=[seen]) as engine:
        assert set(engine.run(parts.square, notes, [1, 2], done=lambda _: None)) == {1, 2}
    assert not list(seen.iterdir())


def test_a_packing_has_the_same_bytes_on_a_cluster_that_loses_a_node(cluster: Any, tmp_path: Path):
    class Losing(RayEngine):
        """Loses a node as soon as anything is made."""

        def run(self, work: Any, request: Any, parts: Any, *, done: Callable[[Any], None]) -> Any:
            def first(result: Any) -> None:
                if lost:
                    cluster.remove_node(lost.pop(), allow_graceful=False)
                done(result)

            return super().run(work, request, parts, done=first)

    lost = [cluster.add_node(num_cpus=2, **STORE)]
    cluster.wait_for_nodes()
    options: dict[str, Any] = {"holdout": 0.2, "samples_per_shard": 40, "name": "d", "report": lambda line: None}
    with open_engine("ray", address=cluster.address, seen_by_all=[tmp_path]):
        pack("digits", tmp_path / "ray", engine=Losing(None), **options)
    assert not lost
    pack("digits", tmp_path / "threads", **options)
    pack("digits", tmp_path / "processes", engine=local_engine(2), **options)
    assert tree(tmp_path / "ray") == tree(tmp_path / "threads") == tree(tmp_path / "processes")


def test_threads_raise_the_failure_that_stopped_the_others_not_that_they_were_stopped():
    begun = threading.Event()

    def work(request: str, part: int) -> None:
        if part == 0:
            begun.set()
            while True:
                give_up_if_stopped()
        begun.wait()
        raise OSError(request)

    with pytest.raises(OSError, match="disk"):
        ThreadEngine(2).run(work, "disk", [0, 1], done=lambda result: None)

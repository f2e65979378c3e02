"""An agent by itself, on this machine and without ssh: what it is told, what it says, and that it leaves no rank."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from shardvit.launch.hosts.agent import AgentOrder, rendezvous_name
from shardvit.launch.local.env import RUN_MARK
from tests.launch.clock import AGENTS_CLOCK, pass_an_hour
from tests.stand_in import stand_in_for_launch

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_SECONDS = 240.0
MORE_LINES = 1000  # than the agent keeps for a reader; what the pipes hold comes on top

# Called like ours (python -u -m shardvit.launch.train), so it is found by its command line.
RANK = f"""
import json, os, signal, sys, time
from pathlib import Path
def stop(*_):
    Path("stopped").touch()
    if sys.argv[1] != "stubborn":
        sys.exit(75)
signal.signal(signal.SIGTERM, stop)
if sys.argv[1] == "first":
    address = Path(os.environ["SHARDVIT_RENDEZVOUS"]) / "address"
    address.write_text("127.0.0.1 4242")
print("a line of the rank", flush=True)
print("and one without an end", end="", flush=True)
Path("environment.tmp").write_text(json.dumps(dict(os.environ)))
os.rename("environment.tmp", "environment.json")
printed = 0
while not Path("go").exists():
    time.sleep(0.02)
    while sys.argv[1] == "loud":
        print("x" * 5000, flush=True)
        printed += 1
        if printed == {MORE_LINES}:
            Path("printed").touch()
sys.exit(int(Path("go").read_text()))
"""
LAUNCHER = """
import os, subprocess, sys
environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
sys.exit(subprocess.call([sys.executable, "-u", "-m", "shardvit.launch.train", *sys.argv[1:]], env=environment) % 256)
"""


@dataclass
class Standing:
    """An agent and its rank."""

    process: subprocess.Popen[str]
    folder: Path
    rendezvous: Path

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def environment(self) -> dict[str, str]:
        self.wait_for(self.folder / "environment.json")
        return json.loads((self.folder / "environment.json").read_text())

    def wait_for(self, file: Path) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not file.exists():
            assert time.monotonic() < deadline and self.process.poll() is None, file
            time.sleep(0.02)

    def pass_an_hour(self) -> None:
        pass_an_hour(self.folder)

    def alive(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(RUN_MARK) == str(self.folder):
                    found.append(process)
        return found

    def finish(self) -> list[str]:
        """Its lines; no rank and no folder is left by then."""
        assert self.process.stdout is not None
        # Its input stays open: that somebody is at the other end is what it listens for.
        self.process.wait(timeout=PATIENCE_SECONDS)
        output = self.process.stdout.read()
        self.wait_for_nobody()
        return output.splitlines()

    def wait_for_nobody(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while alive := self.alive():  # a kill takes effect when the kernel comes to it
            assert time.monotonic() < deadline, alive
            time.sleep(0.02)
        assert not self.rendezvous.exists()


@contextmanager
def agent(tmp_path: Path, kind: str, **changes: object) -> Iterator[Standing]:
    folder = tmp_path / "run"
    stand_in_for_launch(folder, train=RANK, begins=AGENTS_CLOCK)
    (folder / "launcher.py").write_text(LAUNCHER)
    order = AgentOrder(
        word="word",
        run_folder=str(folder),
        command=[sys.executable, "launcher.py", kind],
        environment={"GIVEN": "it's $1"},
        rendezvous=str(tmp_path / rendezvous_name(str(folder), node=0)),
        is_first=kind == "first",
        silence_seconds=600,
        grace_seconds=600,
    )
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "shardvit.launch.hosts.agent"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": "7", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    standing = Standing(process, folder, Path(order.rendezvous))
    standing.tell(replace(order, **changes).line().strip())  # pyright: ignore[reportArgumentType]
    try:
        yield standing
    finally:
        for each in standing.alive():
            each.kill()
        process.kill()
        process.communicate()


def test_the_ranks_get_what_the_order_says_and_their_lines_and_code_are_passed_on(tmp_path: Path):
    with agent(tmp_path, "graceful") as run:
        environment = run.environment()
        assert environment["GIVEN"] == "it's $1" and "RANK" not in environment
        assert environment["SHARDVIT_SUPERVISOR_PID"] == str(run.process.pid)
        assert environment["SHARDVIT_RENDEZVOUS"] == str(run.rendezvous)
        assert run.rendezvous.stat().st_mode & 0o777 == 0o700
        (run.folder / "go.tmp").write_text("7")
        (run.folder / "go.tmp").rename(run.folder / "go")
        lines = run.finish()
        assert lines == ["word ready", "a line of the rank", "and one without an end", "word ended 7"]
        assert run.process.returncode == 7


def test_the_first_host_tells_where_rank_0_listens_and_others_are_told(tmp_path: Path):
    with agent(tmp_path / "first", "first") as run:
        assert run.process.stdout is not None
        while (line := run.process.stdout.readline()) != "word address 4242\n":
            assert line
        run.tell("address 10.0.0.9 1")  # nobody's business to change it
        run.tell("stop")
        assert run.finish()[-1] == "word ended 75"
    with agent(tmp_path / "other", "graceful") as run:
        run.environment()
        run.tell("address 10.0.0.9 4242")
        run.wait_for(run.rendezvous / "address")
        assert (run.rendezvous / "address").read_text() == "10.0.0.9 4242"
        run.tell("stop")
        assert run.finish()[-1] == "word ended 75"


def test_kill_ends_ranks_that_do_not_stop(tmp_path: Path):
    with agent(tmp_path, "stubborn") as run:
        run.environment()
        run.tell("stop")
        run.wait_for(run.folder / "stopped")
        assert run.process.poll() is None
        run.tell("kill")
        assert run.finish()[-1] == f"word ended {128 + signal.SIGKILL}"


@pytest.mark.parametrize("how", ["closed", "silent"])
def test_ranks_do_not_outlive_the_other_side(tmp_path: Path, how: str):
    with agent(tmp_path, "stubborn") as run:
        run.environment()
        if how == "closed":
            assert run.process.stdin is not None
            run.process.stdin.close()
            run.process.stdin = None
        else:
            run.pass_an_hour()
        run.wait_for(run.folder / "stopped")  # asked first
        assert run.process.poll() is None
        run.pass_an_hour()
        lines = run.finish()
        assert any("the ranks of this host are asked to save and leave" in line for line in lines)


def test_ranks_without_a_reader_of_their_lines_save_all_the_same(tmp_path: Path):
    with agent(tmp_path, "graceful") as run:
        run.environment()
        assert run.process.stdout is not None
        run.process.stdout.close()
        run.pass_an_hour()
        run.process.wait(timeout=PATIENCE_SECONDS)
        run.process.stdout = None
        assert (run.folder / "stopped").exists() and run.process.returncode == 75


def test_ranks_that_print_more_than_anybody_reads_do_not_outlive_the_other_side(tmp_path: Path):
    with agent(tmp_path, "loud") as run:
        run.wait_for(run.folder / "printed")
        run.pass_an_hour()
        run.process.wait(timeout=PATIENCE_SECONDS)
        assert (run.folder / "stopped").exists() and run.process.returncode == 75
        run.wait_for_nobody()


def test_a_stop_before_there_is_a_rank_ends_the_launcher_and_counts_as_a_signal(tmp_path: Path):
    with agent(tmp_path, "graceful", command=[sys.executable, "-c", "import time; time.sleep(600)"]) as run:
        run.tell("stop")
        assert run.finish()[-1] == f"word ended {128 + signal.SIGTERM}"


def test_what_an_earlier_attempt_has_left_is_ended_first(tmp_path: Path):
    folders = [tmp_path / rendezvous_name(run, node=node) for run, node in ((str(tmp_path / "run"), 0), ("other", 0))]
    for folder in folders:
        folder.mkdir()
    left = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, RUN_MARK: str(tmp_path / "run")}
    )
    try:
        with agent(tmp_path, "graceful") as run:
            assert left.wait(timeout=PATIENCE_SECONDS) == -signal.SIGKILL
            run.environment()
            assert [folder.exists() for folder in folders] == [False, True]  # the other one is another run's
            run.tell("stop")
            run.finish()
    finally:
        left.kill()
        left.wait()

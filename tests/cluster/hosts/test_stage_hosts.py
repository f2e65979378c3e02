"""Ranks on two real hosts, and what becomes of them: asked to stop, killed, orphaned, cut off. Stand-ins train."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.cluster.hosts.two_hosts import NAMES, TwoHosts
from tests.launch.clock import AGENTS_CLOCK, pass_an_hour
from tests.stand_in import stand_in_for_launch

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_SECONDS = 240.0
STAND_IN, KIND = "SHARDVIT_STAND_IN", "SHARDVIT_KIND"

# Called like ours (python -u -m shardvit.launch.train), so it is found by its command line.
RANK = """
import json, os, signal, socket, sys, time
from pathlib import Path
kind, node = os.environ["SHARDVIT_KIND"], int(os.environ["RANK"])
def stop(*_):
    Path(f"stopped-{node}").touch()
    if kind != "stubborn":
        sys.exit(75)
signal.signal(signal.SIGTERM, stop)
address = Path(os.environ["SHARDVIT_RENDEZVOUS"]) / "address"
if node == 0:
    address.with_name("new").write_text("127.0.0.1 4242")
    address.with_name("new").rename(address)
while not address.exists():
    time.sleep(0.02)
seen = {"address": address.read_text(), "host": socket.gethostname(), "environment": dict(os.environ)}
Path(f"rank-{node}.tmp").write_text(json.dumps(seen))
os.rename(f"rank-{node}.tmp", f"rank-{node}.json")
print("hello from", node, flush=True)
while not (kind == "fails" and node == 1 and Path("fail").exists()):
    time.sleep(0.05)
sys.exit(7)
"""
LAUNCHER = """
import os, subprocess, sys
environment = {**os.environ, "RANK": sys.argv[1]}
sys.exit(subprocess.call([sys.executable, "-u", "-m", "shardvit.launch.train"], env=environment) % 256)
"""
DRIVER = """
import sys
from pathlib import Path
from shardvit.launch.hosts import stage
from shardvit.launch.hosts.hostfile import Fleet
from shardvit.launch.hosts.hostfile import Host
from shardvit.launch.hosts.preflight import Ready
from shardvit.launch.hosts.variables import travelling
from shardvit.launch.local.env import without_place
from shardvit.launch.local.start import Launch
from shardvit.pipeline.recipe.io import load_recipe
from tests.stand_in import stand_in_for_launch
address, follow_seconds = sys.argv[1:]
stage.node_command = lambda launch, fleet, node, master_addr: [sys.executable, "launcher.py", str(node)]
# The agents' times are the test's to pass. What ssh takes for a host's death stays as it is.
stage._HEARTBEAT_SECONDS, stage._SILENCE_SECONDS, stage._GRACE_SECONDS = 0.5, 600.0, 600.0
stage._FOLLOW_SECONDS, stage._ANSWER_SECONDS = float(follow_seconds), 3.0
launch = Launch(load_recipe("digits"), Path("recipe.yaml"), runs_root=Path("runs"), stage="pretrain", processes=2)
fleet = Fleet((Host("alpha", (0,)), Host("beta", (0,))), Path("hostfile"))
ready = Ready(address, {"alpha": "veth0", "beta": "veth0"})
variables, _ = travelling(without_place(), folders=(Path("home"), Path()))
try:
    print("code", stage.run_stage_on_hosts(launch, fleet, ready, variables=variables), flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@dataclass
class Standing:
    """`run_stage_on_hosts` in a process on alpha, and a rank on each host."""

    process: subprocess.Popen[bytes]
    folder: Path
    hosts: TwoHosts

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    @property
    def driver(self) -> psutil.Process:
        return next(each for each in self.all() if command_of(each)[1:3] == ["-c", DRIVER])

    def rank(self, node: int) -> dict[str, object]:
        return json.loads((self.folder / f"rank-{node}.json").read_text())

    def all(self) -> list[psutil.Process]:
        """What is alive of this run, the agents included, which have the login's environment."""
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get(STAND_IN) == str(self.folder) or process.cwd() == str(self.folder)
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return [process for process in found if process.pid != self.process.pid]

    def wait_for(self, *files: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all((self.folder / file).exists() for file in files):
            assert time.monotonic() < deadline, f"{files}: {self.output}"
            time.sleep(0.02)

    def finish(self) -> str:
        """What was printed; nothing is left on either host by then, rendezvous folders included."""
        self.process.wait(timeout=PATIENCE_SECONDS)
        self.wait_for_nobody()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while left := [name for name in NAMES if self.memory_of(name)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        return self.output

    def memory_of(self, name: str) -> str:
        """The names in a host's /dev/shm."""
        return subprocess.run(self.hosts.on(name, "ls", "/dev/shm"), capture_output=True, text=True, check=True).stdout

    def wait_for_nobody(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while alive := self.all():
            assert time.monotonic() < deadline, f"{alive} are still there: {self.output}"
            time.sleep(0.05)


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; empty: it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@contextmanager
def standing(hosts: TwoHosts, folder: Path, kind: str, *, follow_seconds: float = 600.0) -> Iterator[Standing]:
    """Ranks that have begun, and behave as `kind` says; those of one host have `follow_seconds` to end by themselves
    when the other's have failed."""
    folder.mkdir()
    stand_in_for_launch(folder, train=RANK, begins=AGENTS_CLOCK)
    (folder / "launcher.py").write_text(LAUNCHER)
    (folder / ".deepspeed_env").write_text("FROM_A_FILE=some value\n")
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            hosts.on("alpha", sys.executable, "-c", DRIVER, hosts.address("alpha"), str(follow_seconds), folder=folder),
            env={
                **os.environ,
                **hosts.environment(),
                # The stand-ins before ours: no process of ours looks into the working folder by itself.
                "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
                **{STAND_IN: str(folder), KIND: kind, "LEFT": "here"},
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    run = Standing(process, folder, hosts)
    try:
        run.wait_for("rank-0.json", "rank-1.json")
        yield run
    finally:
        for each in run.all():
            each.kill()
        process.kill()
        process.wait()


def test_ranks_meet_under_an_address_that_nobody_had_to_guess_and_have_what_travels(hosts: TwoHosts, tmp_path: Path):
    with standing(hosts, tmp_path / "run", "graceful") as run:
        alpha, beta = run.rank(0), run.rank(1)
        assert (alpha["host"], beta["host"]) == ("alpha", "beta")
        assert alpha["address"] == "127.0.0.1 4242" and beta["address"] == f"{hosts.address('alpha')} 4242"
        for rank in (alpha["environment"], beta["environment"]):
            assert isinstance(rank, dict)
            assert rank["FROM_A_FILE"] == "some value" and rank[STAND_IN] == str(run.folder)
            assert "LEFT" not in rank and rank["DS_ACCELERATOR"] == "cpu"
        assert isinstance(beta["environment"], dict) and beta["environment"]["GLOO_SOCKET_IFNAME"] == "veth0"
        run.driver.send_signal(signal.SIGTERM)
        lines = run.finish().splitlines()
        assert "hello from 0" in lines and "beta: hello from 1" in lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_one_signal_makes_the_ranks_of_all_hosts_save(hosts: TwoHosts, tmp_path: Path, number: signal.Signals):
    with standing(hosts, tmp_path / "run", "graceful") as run:
        run.driver.send_signal(number)
        output = run.finish()
        assert "stopping: the ranks finish their step and save" in output
        assert output.endswith("code 75\n") and "Traceback" not in output
        assert (run.folder / "stopped-0").exists() and (run.folder / "stopped-1").exists()


def test_ctrl_c_again_kills_the_ranks_of_all_hosts(hosts: TwoHosts, tmp_path: Path):
    with standing(hosts, tmp_path / "run", "stubborn") as run:
        run.driver.send_signal(signal.SIGINT)
        run.wait_for("stopped-0", "stopped-1")
        assert len([each for each in run.all() if "shardvit.launch.train" in command_of(each)]) == 2
        run.driver.send_signal(signal.SIGINT)
        output = run.finish()
        assert output.endswith("interrupted\n") and "Traceback" not in output


@pytest.mark.parametrize("kind", ["graceful", "stubborn"])
def test_when_shardvit_run_is_killed_the_ranks_save_or_are_killed_later(hosts: TwoHosts, tmp_path: Path, kind: str):
    with standing(hosts, tmp_path / "run", kind) as run:
        run.driver.kill()
        run.wait_for("stopped-0", "stopped-1")
        if kind == "stubborn":
            assert len([each for each in run.all() if "shardvit.launch.train" in command_of(each)]) == 2
            for name in NAMES:
                pass_an_hour(run.folder, host=name)
        run.finish()


def test_when_the_ranks_of_one_host_fail_those_of_the_other_do_not_stay(hosts: TwoHosts, tmp_path: Path):
    with standing(hosts, tmp_path / "run", "fails", follow_seconds=2.0) as run:
        (run.folder / "fail").touch()
        assert run.finish().endswith("code 7\n")


def test_when_a_host_dies_the_others_ranks_do_not_stay(hosts: TwoHosts, tmp_path: Path):
    with standing(hosts, tmp_path / "run", "stubborn", follow_seconds=2.0) as run:
        hosts.die("beta")
        run.process.wait(timeout=PATIENCE_SECONDS)
        run.wait_for_nobody()
        assert "shardvit: the connection to beta was lost" in run.output and run.output.endswith("code 1\n")


@pytest.mark.slow
def test_when_the_cable_is_pulled_both_sides_find_out_and_no_rank_stays(hosts: TwoHosts, tmp_path: Path):
    with standing(hosts, tmp_path / "run", "stubborn", follow_seconds=2.0) as run:
        hosts.cut()
        pass_an_hour(run.folder, host="beta")
        run.wait_for("stopped-1")  # by its agent, which nobody could tell
        pass_an_hour(run.folder, host="beta")
        output = run.finish()
        assert "shardvit: the connection to beta was lost" in output and output.endswith("code 1\n")

"""128 hosts: all are asked, started and stopped at the same time, by one ssh each, and few lines are printed.

The `ssh` here is a script that answers as a host would, but holds answers back until all hosts have been asked. What
asked one host after another would get no answer.
"""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from shardvit.data_shards.errors import UserError
from shardvit.launch.hosts import host_facts as probe
from shardvit.launch.hosts import preflight as preflight_module
from shardvit.launch.hosts import stage as stage_module
from shardvit.launch.hosts.hostfile import Fleet, Host
from shardvit.launch.hosts.preflight import _MODULES, PACKAGES, Ready, folded, preflight
from shardvit.launch.hosts.stage import run_stage_on_hosts
from shardvit.launch.local.start import Launch
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.vocabulary import EXIT_STOPPED

HOSTS = 128
FLEET = Fleet(tuple(Host(f"node-{number:03}", tuple(range(8))) for number in range(HOSTS)), Path("hosts"))
NAMES = [host.name for host in FLEET.hosts]
PIPE_BYTES = 65536  # that a host may be sent before its ssh reads
PATIENCE_SECONDS = 240.0

# The last two arguments are the host and what to run there.
SSH = r"""#!/bin/sh
while [ $# -gt 2 ]; do shift; done
host=$1
cd @FOLDER@
echo "$host" >>calls
meet() { : >"$1/$host"; read -r _ <"$1.gate"; }
case $2 in
*shardvit.launch.hosts.agent*)
    IFS= read -r order
    word=${order#*'"word": "'}; word=${word%%'"'*}
    printf '%s\n' "${#order}" >"orders/$host"
    echo "$word ready"
    meet begun
    [ "$host" = node-000 ] && echo "$word address 4242"
    while IFS= read -r line; do
        case $line in
        address*) echo "$line" >"addresses/$host"; : >"addressed/$host" ;;
        stop) meet stopped; echo "$word ended 75"; exit 75 ;;
        esac
    done ;;
*)
    read -r count
    head -c "$count" >/dev/null
    while IFS= read -r question; do
        word=${question#*'"word": "'}; word=${word%%'"'*}
        case $question in
        *'"ask": "facts"'*)
            meet asked
            echo "$word$(sed -e "s/@HOST@/$host/" -e "s/\"@CLOCK@\"/$(date +%s.%N)/" facts.json)" ;;
        *) meet connecting; echo "$word{\"node-000\": [\"10.0.0.1\", \"ib0\"]}" ;;
        esac
    done ;;
esac
"""


@dataclass
class Cluster:
    """The folder in which the hosts leave what happened."""

    folder: Path
    most_threads: int = 0  # of this process, while the hosts were at a gate
    most_children: int = 0
    others: int = field(default_factory=lambda: len(psutil.Process().children()))  # children left by other tests
    over: threading.Event = field(default_factory=threading.Event)

    def there(self, what: str) -> list[str]:
        return sorted(os.listdir(self.folder / what))

    def let_pass(self, what: str, *, hosts: int = HOSTS, then: Callable[[], None] = lambda: None) -> None:
        """In a thread: once so many hosts are at a gate, open it."""

        def wait() -> None:
            gate = os.open(self.folder / f"{what}.gate", os.O_RDWR)
            while len(self.there(what)) < hosts and not self.over.wait(0.05):
                pass
            self.most_threads = max(self.most_threads, threading.active_count())
            self.most_children = max(self.most_children, len(psutil.Process().children()) - self.others)
            os.write(gate, b"\n" * hosts)
            then()
            self.over.wait(PATIENCE_SECONDS)
            os.close(gate)

        threading.Thread(target=wait, daemon=True).start()

    @property
    def calls(self) -> list[str]:
        return sorted((self.folder / "calls").read_text().split())


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    folder = tmp_path / "cluster"
    for name in ("bin", "orders", "addresses", "addressed"):
        (folder / name).mkdir(parents=True)
    for name in ("asked", "connecting", "begun", "stopped"):
        (folder / name).mkdir()
        os.mkfifo(folder / f"{name}.gate")
    (folder / "bin" / "ssh").write_text(SSH.replace("@FOLDER@", str(folder)))
    (folder / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(preflight_module, "_ANSWER_SECONDS", PATIENCE_SECONDS)
    for name in ("_FOLLOW_SECONDS", "_FOLLOW_SAVED_SECONDS"):
        monkeypatch.setattr(stage_module, name, PATIENCE_SECONDS)
    found = Cluster(folder)
    yield found
    found.over.set()


def write_facts(cluster: Cluster, runs: Path, **changes: object) -> None:
    question = {"folder": str(runs), "marker": ["", ""], "files": [], "packages": PACKAGES, "modules": _MODULES}
    with no_wait():
        told = probe.answer({**question, "listen": False, "port": 0})
    told |= {"machine": "@HOST@", "clock": "@CLOCK@", "sees_marker": True, "gpus": 8, "port": 4000}
    told["addresses"] = {"10.0.0.1": "ib0"}
    (cluster.folder / "facts.json").write_text(json.dumps({**told, **changes}))


@contextmanager
def no_wait() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "_SEE_SECONDS", 0.0)
        yield


def test_128_hosts_are_asked_at_the_same_time(cluster: Cluster, tmp_path: Path):
    runs, said = tmp_path / "runs", list[str]()
    runs.mkdir()
    write_facts(cluster, runs)
    cluster.let_pass("asked")
    cluster.let_pass("connecting", hosts=HOSTS - 1)
    threads = threading.active_count()
    ready = preflight(FLEET, folder=runs, files=[], python_path="", say=said.append)
    assert ready == Ready("10.0.0.1", dict.fromkeys(NAMES, "ib0"))
    assert cluster.calls == NAMES and cluster.there("connecting") == NAMES[1:]
    assert len(said) == 1 and len(said[0].splitlines()) == HOSTS + 2
    assert cluster.most_children <= HOSTS and cluster.most_threads <= threads + HOSTS
    assert len(psutil.Process().children()) <= cluster.others and not list(runs.iterdir())


def test_what_128_hosts_have_wrong_alike_is_one_sentence(cluster: Cluster, tmp_path: Path):
    runs = tmp_path / "runs"
    runs.mkdir()
    write_facts(cluster, runs, code="other", revision="")
    cluster.let_pass("asked")
    with pytest.raises(UserError, match="128 of 128 hosts") as refused:
        preflight(FLEET, folder=runs, files=[], python_path="", say=lambda text: None)
    head, *sentences = str(refused.value).splitlines()
    assert len(sentences) == 1 and all(name in sentences[0] for name in NAMES), head
    assert "node-000 has other code" in sentences[0] and "127 more" in sentences[0]


def test_only_equal_sentences_are_folded():
    problems = {"a1": ["a1 is away", "a1 is old"], "b2": [], "c3": ["c3 is old"], "d4": ["d4 is away since 3"]}
    assert folded(problems) == ["a1 is away", "a1 is old (the same of 1 more: c3)", "d4 is away since 3"]


def test_128_hosts_are_started_and_stopped_at_the_same_time(
    cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    launch = Launch(load_recipe("digits"), tmp_path / "recipe.yaml", tmp_path / "runs", "pretrain", processes=1024)

    def stop_when_all_know_the_address() -> None:
        while len(cluster.there("addressed")) < HOSTS - 1 and not cluster.over.wait(0.05):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    cluster.let_pass("begun", then=stop_when_all_know_the_address)
    cluster.let_pass("stopped")
    threads = threading.active_count()
    code = run_stage_on_hosts(launch, FLEET, Ready("10.0.0.1", {}), variables={})
    assert code == EXIT_STOPPED
    assert cluster.calls == cluster.there("stopped") == NAMES
    for name in NAMES[1:]:
        assert (cluster.folder / "addresses" / name).read_text() == "address 10.0.0.1 4242\n"
    # A host's order fits into a pipe, so sending it waits for no host's ssh.
    assert max(int((cluster.folder / "orders" / name).read_text()) for name in NAMES) < PIPE_BYTES // 4
    assert cluster.most_children <= HOSTS and cluster.most_threads <= threads + HOSTS + 1
    out, err = capfd.readouterr()
    assert len((out + err).strip().splitlines()) == 1
    assert len(psutil.Process().children()) <= cluster.others

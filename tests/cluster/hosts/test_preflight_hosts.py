"""What is wrong with a host is found before any GPU's time, in a sentence each, on real hosts."""

import shutil
import sys
from pathlib import Path

from tests.cluster.hosts.conftest import NewHosts, run_on
from tests.cluster.hosts.two_hosts import Difference, TwoHosts
from tests.faults.harness import ROOT, Case, Ended

WAIT_SECONDS = 240.0


def preflight(hosts: TwoHosts, case: Case, *arguments: str) -> Ended:
    """`--dry-run`: everything is asked, nothing is started."""
    ended = run_on(hosts, case, "--dry-run", "processes=auto", *arguments).wait(WAIT_SECONDS)
    assert "Traceback" not in ended.output
    assert not case.run.exists() and not list((case.folder / "runs").glob("*"))  # the marker is gone, nothing began
    return ended


def test_hosts_that_are_alike_are_ready_and_so_says_the_table(hosts: TwoHosts, case: Case):
    ended = preflight(hosts, case)
    assert ended.code == 0, ended.output
    assert ended.sentence("^host .*slots.*Python.*torch.*deepspeed.*code.*clock.*verdict")
    for name in ("alpha", "beta"):
        assert ended.sentence(f"^{name} .*ready$")
    told = ended.sentence("variables that go")
    assert "MLFLOW_TRACKING_URI" in told and "OMP_NUM_THREADS" in told and "127.0.0.1:9" not in ended.output
    assert "global_batch_size" in ended.output  # the recipe


def test_a_host_that_nobody_reaches(hosts: TwoHosts, case: Case):
    hosts.cut()
    ended = preflight(hosts, case)
    assert ended.code == 2
    assert ended.sentence("1 of 2 hosts of hostfile is not ready")
    assert ended.sentence("beta is not reachable .*: `ssh beta true` has to work without a prompt")
    assert ended.sentence("^alpha .*ready$")


def test_a_host_without_the_folder_that_the_command_was_started_in(new_hosts: NewHosts, case: Case):
    hosts = new_hosts(Difference(commands=[f"mount -t tmpfs none {case.folder}"]))
    ended = preflight(hosts, case)
    assert ended.code == 2
    assert ended.sentence("beta does not see what this host writes to runs: let --runs name a folder")


def test_other_code_software_clock_and_data_are_told_each(new_hosts: NewHosts, case: Case, tmp_path: Path):
    other, environment = tmp_path / "other-revision", Path(sys.prefix)
    # An environment that lies in the repository, as `make test` has it, is gigabytes: it is shown, not copied.
    shutil.copytree(ROOT, other, ignore=shutil.ignore_patterns(".*", "__pycache__", environment.name))
    shown = []
    if environment.is_relative_to(ROOT):
        place = other / environment.relative_to(ROOT)
        place.mkdir(parents=True)
        shown = [f"mount --bind {environment} {place}"]
    train = other / "launch" / "train.py"
    train.write_text(train.read_text() + "# one line more\n")
    manifest = case.shards / "train" / "manifest.json"
    changed = tmp_path / "manifest.json"
    changed.write_text(manifest.read_text() + "\n")
    (other / "sitecustomize.py").write_text(  # the command's PYTHONPATH leads there
        "import importlib.metadata, platform, time\n"
        "real, version = time.time, importlib.metadata.version\n"
        "time.time = lambda: real() + 100_000\n"
        "platform.python_version = lambda: '3.99.0'\n"
        "importlib.metadata.version = lambda name: '0.1' if name == 'torch' else version(name)\n"
    )
    hosts = new_hosts(
        Difference(
            commands=[
                *shown,
                f"mount --rbind {other} {ROOT}",
                f"mount --bind {changed} {manifest}",
            ]
        )
    )
    ended = preflight(hosts, case)
    assert ended.code == 2
    for sentence in (
        "1 of 2 hosts of hostfile is not ready",
        "beta has Python 3.99.0, this host 3.1",
        "beta has torch 0.1, this host ",
        "beta has other code of shardvit than this host",
        # A little less is told the longer the answer takes.
        r"beta's clock is (99\d{3}|100000) seconds ahead of this host's: set both by NTP",
        f"{manifest} on beta is not the one on this host",
    ):
        assert ended.sentence(sentence), sentence
    assert ended.sentence(r"^beta .*\+(99\d{3}|100000)\.\d s .*5 problems$")


def test_a_slot_without_a_gpu(new_hosts: NewHosts, case: Case):
    # One host with a GPU, as far as its device files say, the other with none.
    hosts = new_hosts(Difference(commands=["mount -t tmpfs none /dev", "touch /dev/nvidia0", "mknod /dev/null c 1 3"]))
    ended = preflight(hosts, case)
    assert ended.code == 2
    assert ended.sentence(r"alpha has \d+ GPUs, and slot 0 \(counted from 0\) is asked for: lower its slots")


def test_an_address_under_which_the_first_host_is_not_reached(hosts: TwoHosts, case: Case):
    ended = preflight(hosts, case, "--master-addr", "127.0.0.1")
    assert ended.code == 2
    assert ended.sentence("beta does not reach alpha at 127.0.0.1, port .*: open the ports between the hosts")


def test_the_processes_must_be_the_slots(hosts: TwoHosts, case: Case):
    ended = run_on(hosts, case, "--dry-run", "processes=3").wait(WAIT_SECONDS)
    assert ended.code == 2
    assert ended.sentence("processes is 3, but the slots of hostfile that are used are 2: set processes=auto")


def test_one_host_left_is_enough(hosts: TwoHosts, case: Case):
    hosts.cut()
    ended = preflight(hosts, case, "--exclude", "beta")
    assert ended.code == 0, ended.output
    assert "beta" not in "".join(line for line in ended.output.splitlines() if "ready" in line)

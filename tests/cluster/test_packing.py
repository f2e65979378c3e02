"""A packing on a real SLURM: plan, array, finish; a node is killed in the middle, and the bytes are the same."""

import json
import re
import sys
from pathlib import Path

import pytest

from shardvit.data_shards.packing.pack import pack
from tests.cluster.conftest import ROOT
from tests.cluster.slurm_cluster import Done, SlurmCluster
from tests.data_shards.packing.folders import tree

TASKS = 4
FLAGS = ("--holdout", "0.2", "--samples-per-shard", "100", "--name", "d")


class Packing:
    """SOURCE -> OUT, and the command line that submits it."""

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.out = folder / "my set"
        self.hold = folder / "hold"  # while it is there, shards are not made
        self.python = folder / "python that waits"
        self.python.write_text(
            f"#!/bin/bash\necho start $* >> '{folder}/starts'\n"
            f"case \"$*\" in *'--step shards '*) while [ -e '{self.hold}' ]; do sleep 0.1; done;; esac\n"
            f"exec '{sys.executable}' \"$@\"\n"
        )
        self.python.chmod(0o755)
        (folder / "site.toml").write_text(f'python = "{self.python}"\n')

    def cli(self, *arguments: str, check: bool = True) -> Done:
        command = (sys.executable, "-m", "shardvit.launch.cli", *arguments)
        return self.slurm.run(*command, cwd=self.folder, environment={"PYTHONPATH": str(ROOT)}, check=check)

    def submit(self, *more: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+): job (\d+)", self.asked(*more).out))

    def asked(self, *more: str, check: bool = True) -> Done:
        """Submit it, and return what the command says."""
        job = ("--tasks", str(TASKS), "--time", "0:10:00", "--site", "site.toml")
        return self.cli("submit", "--pack", "digits", self.out.name, *FLAGS, *job, *more, check=check)

    def log(self, name: str) -> str:
        path = self.folder / "my set.jobs" / "slurm" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def wait_for_state(self, job: str, state: str) -> None:
        def there() -> bool:
            self.slurm.hurry(job)
            return self.slurm.state(job) == state

        try:
            self.slurm.wait_until(there, what=f"{state} of {job}")
        except AssertionError as error:
            logs = sorted((self.folder / "my set.jobs" / "slurm").glob("*.log"))
            raise AssertionError(
                "\n".join([str(error), *(f"--- {each}\n{each.read_text()}" for each in logs)])
            ) from None


@pytest.fixture
def packing(slurm: SlurmCluster, tmp_path: Path) -> Packing:
    return Packing(slurm, tmp_path)


def test_an_array_packs_the_same_bytes_though_a_node_dies(packing: Packing, tmp_path: Path):
    packing.hold.touch()
    jobs = packing.submit()
    assert list(jobs) == ["plan", "shards", "finish"]
    slurm = packing.slurm
    slurm.wait_until(lambda: "1" in re.findall(r"job \d+_(\d) on", packing.log("shards-1")), what="task 1")
    seen = json.loads(packing.cli("status", str(packing.out), "--json").out)
    assert (seen["state"], seen["shards"], seen["of_shards"], seen["of_images"]) == ("packing", 0, 19, 1797)
    assert seen["jobs"]["shards"] == [jobs["shards"], "RUNNING"]
    assert "has jobs in the queue" in packing.asked(check=False).error
    slurm.run("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    slurm.wait_until(
        lambda: "PENDING" in slurm.run("squeue", "-h", "-o", "%T", "--jobs", jobs["shards"], "-r").out, what="requeue"
    )
    packing.hold.unlink()
    slurm.run("scontrol", "update", "NodeName=node2", "State=RESUME", check=False)

    def finished() -> bool:
        for task in range(TASKS):
            slurm.hurry(f"{jobs['shards']}_{task}")
        return slurm.state(jobs["finish"]) == "COMPLETED"

    slurm.wait_until(finished, what="end", patience_seconds=300)
    assert "requeued 1 times" in "".join(packing.log(f"shards-{task}") for task in range(TASKS))
    pack("digits", tmp_path / "alone", holdout=0.2, samples_per_shard=100, name="d", report=lambda line: None)
    assert tree(packing.out) == tree(tmp_path / "alone")
    assert packing.cli("status", str(packing.out)).out.startswith(f"{packing.out}: packed\n")
    assert not packing.submit()  # nothing is left to do


def test_only_what_is_not_done_is_submitted_again_after_a_cancel(packing: Packing):
    packing.hold.touch()
    jobs = packing.submit()
    packing.wait_for_state(jobs["plan"], "COMPLETED")
    packing.cli("cancel", str(packing.out))
    packing.wait_for_state(jobs["finish"], "CANCELLED")
    packing.slurm.wait_until(lambda: not packing.slurm.run("squeue", "-h").out.strip(), what="empty queue")
    packing.cli("pack", "digits", packing.out.name, *FLAGS, "--step", "shards", "--task", "1", "--of", str(TASKS))
    rendered = packing.asked("--render").out  # what outlived the cancel still waits
    assert re.findall(r"--array=(.*)", rendered) == ["0,2-3"] and "--step plan" not in rendered
    packing.hold.unlink()
    again = packing.submit()
    assert list(again) == ["shards", "finish"]
    packing.wait_for_state(again["finish"], "COMPLETED")
    assert (packing.out / "train" / "manifest.json").exists()

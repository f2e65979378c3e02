"""A SLURM for the session, a run to submit to it, and a stand-in for training where only the queue matters."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from shardvit.data_shards.durable import replace_text
from shardvit.launch.slurm.records import End, read_ends
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.runs.run_folder import RunFolder, StageRecord
from tests.cluster.slurm_cluster import Done, SlurmCluster, missing
from tests.launch.machine import make_shards, on_shards

ROOT = Path(__file__).resolve().parents[2]
GO_ON = "continue"  # the order "until" of a stand-in that must not have ended before the test has done what it does


@pytest.fixture(scope="session")
def _slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    why_not = missing()
    if why_not:
        pytest.skip(why_not)
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def slurm(_slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster, with nothing in its queue."""
    _slurm.cancel_all()
    yield _slurm
    _slurm.cancel_all()


@dataclass
class SubmittedRun:
    """A run folder that is handed to the cluster."""

    slurm: SlurmCluster
    folder: Path  # for everything of the test
    python: Path  # that the jobs call
    recipe: str
    overrides: list[str]
    name: str

    @property
    def run(self) -> Path:
        return self.folder / "runs" / self.name

    def record(self, stage: StageName) -> StageRecord:
        """A stage's record."""
        return RunFolder(runs_root=self.run.parent, name=self.name).record(stage)

    def ends(self, stage: StageName) -> list[End]:
        """How its attempts ended."""
        return read_ends(self.run / "slurm", stage)

    def log(self, stage: StageName) -> str:
        """What its jobs have printed."""
        path = self.run / "slurm" / f"{stage}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def order(self, **orders: object) -> None:
        """Tell the stand-in what to do."""
        self.run.mkdir(parents=True, exist_ok=True)
        replace_text(self.run / "orders.json", json.dumps(orders))

    def go_on(self) -> None:
        """Let a stand-in come to its end that was told to wait for this."""
        (self.run / GO_ON).touch()

    def cli(self, command: str, *arguments: str, check: bool = True) -> Done:
        """`shardvit COMMAND ...`."""
        return self.slurm.run(
            *(sys.executable, "-m", "shardvit.launch.cli", command, *arguments),
            cwd=self.folder,
            environment={"PYTHONPATH": str(ROOT)},
            check=check,
        )

    def submit(self, *options: str, nodes: int = 2, time: str = "0:10:00") -> dict[str, str]:
        """Submit it; returns each stage's job."""
        site = self.folder / "site.toml"
        site.write_text(f'python = "{self.python}"\n')
        done = self.cli(
            *("submit", self.recipe, *self.overrides, "--nodes", str(nodes), "--tasks-per-node", "1", "--time", time),
            *("--site", str(site), *options),
        )
        return dict(re.findall(r"(\w+): job (\d+)", done.out))

    def wait_for(self, condition: Callable[[], object], *, what: str, patience_seconds: float = 240.0) -> None:
        """Wait; when in vain, show the logs."""
        try:
            self.slurm.wait_until(condition, what=what, patience_seconds=patience_seconds)
        except AssertionError as error:
            logs = [f"--- {path.name}\n{path.read_text()[-4000:]}" for path in self.run.glob("slurm/*.log")]
            raise AssertionError("\n".join([str(error), *logs])) from None

    def wait_for_log(self, stage: StageName, text: str, *, patience_seconds: float = 240.0) -> None:
        """Wait until `text` is in a stage's log."""
        self.wait_for(
            lambda: text in self.log(stage), what=f"{text!r} in {stage}.log", patience_seconds=patience_seconds
        )

    def wait_for_ranks(self, stage: StageName, *, from_step: int = 0) -> None:
        """Wait until both processes have begun."""
        for rank in (0, 1):
            self.wait_for_log(stage, f"rank {rank} of 2 resumes from step {from_step}")

    def kill_a_rank(self) -> None:
        """As the kernel does for want of memory; not the first rank, which may be making MLflow's database."""
        command = ["shardvit.launch.train", str(self.run / "slurm" / "recipe.yaml")]
        ranks = [process for process in psutil.process_iter() if _has(process, command)]
        pids = {process.pid for process in ranks}
        ranks = [process for process in ranks if process.ppid() not in pids]  # not their worker processes
        assert len(ranks) == 2, ranks
        next(process for process in ranks if process.environ()["SLURM_PROCID"] == "1").kill()

    def wait_for_attempt(self, stage: StageName, job: str, *, from_step: int, patience_seconds: float = 240.0) -> None:
        """Wait until a requeued job continues."""

        def begun() -> bool:
            self.slurm.hurry(job)
            return all(f"rank {rank} of 2 resumes from step {from_step}\n" in self.log(stage) for rank in (0, 1))

        self.wait_for(begun, what=f"attempt from step {from_step}", patience_seconds=patience_seconds)

    def wait_for_state(self, job: str, *states: str, patience_seconds: float = 240.0) -> str:
        """Wait until a job is in one of these states; a requeued one is hurried on the way."""

        def there() -> bool:
            if "PENDING" not in states:
                self.slurm.hurry(job)
            return self.slurm.state(job) in states

        self.wait_for(there, what=f"{' or '.join(states)} of job {job}", patience_seconds=patience_seconds)
        return self.slurm.state(job)


def _has(process: psutil.Process, words: list[str]) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    return bool(command) and "python" in command[0] and all(word in command for word in words)


@pytest.fixture
def stand_in_run(slurm: SlurmCluster, tmp_path: Path) -> SubmittedRun:
    """A recipe of three stages, whose processes are stand-ins for training: milliseconds to start, 2 s a stage."""
    for split in ("train", "val"):
        make_shards(tmp_path / "shards" / split)
    python = tmp_path / "python with stand-in"  # a space: what is not quoted fails
    python.write_text(
        f"#!/bin/bash\nexport PYTHONPATH={ROOT}\n"
        'for last in "$@"; do if [ "$last" = shardvit.launch.train ]; then\n'
        f'    shift 3; exec {sys.executable} -m tests.cluster.stand_in "$@"\nfi; done\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    overrides = [*on_shards(tmp_path / "shards"), "processes=auto"]
    return SubmittedRun(slurm, tmp_path, python, "digits", overrides, "digits")

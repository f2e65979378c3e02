"""`shardvit cancel`: nothing comes back, and what runs may save first."""

from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.launch.slurm.cancel import cancel_run
from shardvit.launch.slurm.commands import Queued
from shardvit.launch.slurm.records import Submission, read_cancelled, write_submission
from tests.launch.slurm.fake_slurm import FakeSlurm

ALL = {"1", "2", "3"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    jobs = {"pretrain": "1", "swap_head": "2", "finetune": "3"}
    write_submission(tmp_path / "slurm", Submission(time=0, processes=2, limit_seconds=60, max_restarts=1, jobs=jobs))
    return tmp_path


def cluster(state: str) -> FakeSlurm:
    return FakeSlurm(states={"1": Queued(state), "2": Queued("PENDING"), "3": Queued("PENDING")})


def test_what_waits_is_removed_and_what_runs_saves(run: Path):
    slurm, said = cluster("RUNNING"), []

    def later(seconds: float) -> None:
        assert read_cancelled(run / "slurm") == ALL
        slurm.states["1"] = Queued("FAILED")

    assert cancel_run(run, slurm=slurm, say=said.append, sleep=later) == 3
    assert slurm.signalled == ["1"] and slurm.cancelled == ["3", "2"]
    assert "job 1 saves and ends" in " ".join(said)


def test_what_does_not_end_is_cancelled_and_told_once(run: Path):
    slurm, said = cluster("RUNNING"), []
    cancel_run(run, slurm=slurm, wait_seconds=6, say=said.append, sleep=lambda seconds: None)
    assert slurm.signalled == ["1"] and slurm.cancelled == ["3", "2", "1"]
    assert "cancelled without a checkpoint: 1" in said[-1]


def test_a_job_that_requeued_itself_meanwhile_is_removed_as_well(run: Path):
    slurm = cluster("COMPLETING")

    def later(seconds: float) -> None:
        if slurm.states["1"].state == "COMPLETING":
            slurm.states["1"] = Queued("PENDING", "BeginTime")

    cancel_run(run, slurm=slurm, say=lambda text: None, sleep=later)
    assert slurm.cancelled == ["3", "2", "1"] and slurm.signalled == []


def test_now_waits_for_nothing(run: Path):
    slurm = cluster("RUNNING")
    cancel_run(run, slurm=slurm, how="now", say=lambda text: None, sleep=pytest.fail)
    assert slurm.signalled == [] and slurm.cancelled == ["3", "2", "1"] and read_cancelled(run / "slurm") == ALL


def test_nothing_is_left_to_cancel(run: Path):
    slurm, said = FakeSlurm(states={"1": Queued("COMPLETED")}), []
    assert cancel_run(run, slurm=slurm, say=said.append) == 0
    assert slurm.cancelled == [] and "no job is in the queue" in said[0]


def test_a_run_that_was_never_submitted(tmp_path: Path):
    with pytest.raises(UserError, match="was not submitted"):
        cancel_run(tmp_path, slurm=FakeSlurm())

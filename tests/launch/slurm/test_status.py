"""`shardvit status`: what the run folder and the queue say, also without a queue."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from data_shards.errors import UserError
from launch.bench.scale_ranks import counting
from launch.slurm.commands import Queued
from launch.slurm.records import End, Submission, write_ends, write_submission
from launch.slurm.status import as_text, as_tree, run_status
from pipeline.recipe.io import dump_recipe, load_recipe
from pipeline.runs.metrics_log import open_metrics_log
from pipeline.runs.run_folder import RunFolder
from pipeline.tracking.run_state import RunState
from tests.launch.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run whose pretrain stands at step 400 of 800, ten steps a second, in its third attempt."""
    folder = RunFolder(runs_root=tmp_path, name="digits")
    folder.open(load_recipe("digits"))
    folder.update("pretrain", state="running", last_saved_step=350)
    (folder.checkpoints("pretrain") / "step-00000350").mkdir(parents=True)
    RunState(folder.stage("pretrain") / "mlflow.json", attempt=3).save()
    path = folder.stage("pretrain") / "metrics.jsonl"
    open_metrics_log(path, resume_step=-1).close()
    rows = [
        {"step": step, "images_seen": step * 64, "time": 1000.0 + step / 10, "metrics": {"train/loss": 1.0}}
        for step in range(50, 401, 50)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def submitted(folder: RunFolder) -> Submission:
    submission = Submission(
        time=0,
        processes=2,
        limit_seconds=3600,
        max_restarts=1,
        jobs={"pretrain": "7", "swap_head": "8", "finetune": "9"},
        total_steps={"pretrain": 800, "finetune": 50},
    )
    write_submission(folder.path / "slurm", submission)
    return submission


def test_a_submitted_run(folder: RunFolder):
    submitted(folder)
    end = End(job="7", time=0, kind="stopped", code=75, last_saved_step=350, sentence="not finished: requeued")
    write_ends(folder.path / "slurm", "pretrain", [end])
    queue = {"7": Queued("RUNNING", left_seconds=15, nodes="node[1-2]"), "8": Queued("PENDING", "Dependency")}
    status = run_status(folder.path, slurm=FakeSlurm(states=queue, old={"9": "CANCELLED"}))
    pretrain, swap_head, finetune = status.stages
    assert (pretrain.step, pretrain.total_steps, pretrain.restarts, pretrain.saved_step) == (400, 800, 2, 350)
    assert pretrain.eta_seconds == pytest.approx(40.0) and pretrain.left_seconds == 15
    assert pretrain.saved_seconds_ago is not None and 0 <= pretrain.saved_seconds_ago < 600
    assert (swap_head.state, swap_head.queue, swap_head.reason) == ("new", "PENDING", "Dependency")
    assert finetune.queue == "CANCELLED" and finetune.total_steps == 50
    text = as_text(status)
    for part in ("400 of 800", "40.0 s", "RUNNING node[1-2]", "PENDING (Dependency)", "requeued", "about once"):
        assert part in text, text
    assert json.loads(json.dumps(as_tree(status)))["stages"][0]["job"] == "7"


def test_a_local_run_needs_no_slurm_and_no_shards(folder: RunFolder):
    status = run_status(folder.path, slurm=FakeSlurm(away=True))
    assert status.submission is None and status.stages[0].step == 400 and status.stages[0].total_steps is None
    assert len(status.notes) == 1 and "the number of steps is unknown" in status.notes[0]
    assert "400" in as_text(status)


def test_a_queue_that_does_not_answer_hides_only_itself(folder: RunFolder):
    submitted(folder)
    status = run_status(folder.path, slurm=FakeSlurm(away=True))
    assert status.stages[0].total_steps == 800 and status.stages[0].queue == ""
    assert "the queue is unknown: squeue is not on this machine" in as_text(status)


def test_before_the_first_job_has_begun(folder: RunFolder):
    submitted(folder)
    (folder.path / "slurm" / "recipe.yaml").write_text(dump_recipe(load_recipe("digits")))
    (folder.path / "recipe.yaml").unlink()
    assert [stage.stage for stage in run_status(folder.path, slurm=FakeSlurm()).stages] == [
        *("pretrain", "swap_head", "finetune")
    ]


@pytest.mark.parametrize(("left", "limit", "needed"), [(40, 10, 0), (39, 10, 1), (15, 10, 3), (0, 60, 1)])
def test_how_often_it_will_be_requeued(folder: RunFolder, left: int, limit: int, needed: int):
    submission = replace(submitted(folder), limit_seconds=limit)
    write_submission(folder.path / "slurm", submission)
    slurm = FakeSlurm(states={"7": Queued("RUNNING", left_seconds=left)})
    status = run_status(folder.path, slurm=slurm)
    assert status.stages[0].requeues_needed == needed and status.stages[1].requeues_needed is None
    assert (f"about {needed} times" in as_text(status)) is (needed > 1)


def test_what_is_no_run_folder(tmp_path: Path):
    with pytest.raises(UserError, match="is not a run folder"):
        run_status(tmp_path, slurm=FakeSlurm())


def test_what_is_read_does_not_grow_with_the_ranks(folder: RunFolder):
    submitted(folder)
    counts: list[int] = []
    for ranks in (2, 1024):
        (folder.stage("pretrain") / "ranks").mkdir(exist_ok=True)
        for rank in range(ranks):  # heartbeats, stacks, and each rank's part of a checkpoint
            for name in (f"ranks/rank-{rank}.json", f"ranks/rank-{rank}.txt"):
                (folder.stage("pretrain") / name).touch()
            (folder.checkpoints("pretrain") / "step-00000350" / f"zero_pp_rank_{rank}_optim_states.pt").touch()
        with counting(folder.path) as counter:
            assert run_status(folder.path, slurm=FakeSlurm()).stages[0].step == 400
        counts.append(counter.operations)
    assert 0 < counts[0] == counts[1] < 50

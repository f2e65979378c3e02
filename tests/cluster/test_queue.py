"""Jobs of a real SLURM: chained, requeued, given up, cancelled. The training is a stand-in (see stand_in.py)."""

import json
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import GO_ON, SubmittedRun
from tests.cluster.slurm_cluster import SlurmCluster

STAGES = ("pretrain", "swap_head", "finetune")


def test_three_stages_run_one_after_the_other_on_two_nodes(stand_in_run: SubmittedRun):
    run = stand_in_run
    run.order(until=GO_ON)
    jobs = run.submit()
    assert tuple(jobs) == STAGES
    assert run.slurm.state(jobs["finetune"]) == "PENDING"
    run.wait_for_ranks("pretrain")
    run.go_on()
    for stage in STAGES:
        assert run.wait_for_state(jobs[stage], "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED"
        assert run.record(stage).state == "done"
    assert "swap_head rank 0 of 1 resumes" in run.log("swap_head")
    assert "all stages are done" in run.cli("submit", *_again(run)).error


def test_a_job_that_is_told_of_its_time_limit_saves_is_requeued_and_goes_on(stand_in_run: SubmittedRun):
    run = stand_in_run
    run.order(save_every=0, until=GO_ON)
    jobs = run.submit()
    run.wait_for_ranks("pretrain")
    run.slurm.run("scancel", "--signal=USR1", "--batch", jobs["pretrain"])  # what SLURM sends for --signal
    run.wait_for_log("pretrain", "requeued, it resumes from step")
    saved = run.record("pretrain").last_saved_step
    assert saved > 0 and run.record("pretrain").state == "running"
    run.wait_for_attempt("pretrain", jobs["pretrain"], from_step=saved)
    status = json.loads(run.cli("status", str(run.run), "--json").out)["stages"]
    assert [(stage["stage"], stage["queue"]) for stage in status] == [
        ("pretrain", "RUNNING"),
        *((stage, "PENDING") for stage in STAGES[1:]),
    ]
    assert 0 < status[0]["left_seconds"] <= 600 and status[1]["reason"] == "Dependency"
    run.go_on()
    assert run.wait_for_state(jobs["finetune"], "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED"
    assert [end.kind for end in run.ends("pretrain")] == ["stopped"]
    assert "requeued 1 times" in run.log("pretrain")


def test_a_requeue_by_an_administrator_loses_nothing(stand_in_run: SubmittedRun):
    run = stand_in_run
    run.order(save_every=0, until=GO_ON)
    jobs = run.submit()
    run.wait_for_ranks("pretrain")
    run.slurm.run("scontrol", "requeue", jobs["pretrain"])
    run.wait_for(lambda: run.record("pretrain").last_saved_step, what="save")
    saved = run.record("pretrain").last_saved_step
    run.go_on()
    assert run.wait_for_state(jobs["pretrain"], "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED"
    assert f"resumes from step {saved}" in run.log("pretrain")
    assert all(end.kind == "taken away" for end in run.ends("pretrain"))


def test_a_node_that_goes_down_takes_its_job_back_to_the_queue(stand_in_run: SubmittedRun):
    run = stand_in_run
    run.order(until=GO_ON)
    jobs = run.submit()
    run.wait_for(lambda: run.record("pretrain").last_saved_step >= 5, what="checkpoint")
    run.slurm.run("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    run.wait_for_state(jobs["pretrain"], "PENDING")
    run.go_on()
    run.wait_for(lambda: not _is_running(jobs["pretrain"]), what="end of the step, as on a node that is down")
    run.slurm.run("scontrol", "update", "NodeName=node2", "State=RESUME", check=False)  # it may be back by itself
    assert run.wait_for_state(jobs["pretrain"], "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED"
    assert run.log("pretrain").count("rank 0 of 2 resumes from step") >= 2
    assert "requeued 1 times" in run.log("pretrain")


def test_a_job_of_higher_priority_takes_the_nodes_and_gives_them_back(stand_in_run: SubmittedRun):
    run = stand_in_run
    run.order(save_every=0, until=GO_ON)
    jobs = run.submit("--partition", "low")
    run.wait_for_ranks("pretrain")
    urgent = run.folder / "urgent.sh"
    urgent.write_text("#!/bin/bash\nsleep 1\n")
    high = run.slurm.run("sbatch", "--parsable", "-p", "high", "-N2", "--exclusive", urgent).out.strip()
    assert run.wait_for_state(high, "COMPLETED", "FAILED") == "COMPLETED"
    saved = run.record("pretrain").last_saved_step
    assert saved > 0
    run.go_on()
    assert run.wait_for_state(jobs["pretrain"], "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED"
    assert f"resumes from step {saved}" in run.log("pretrain")


def test_a_crash_is_started_again_and_one_that_gets_no_further_given_up(stand_in_run: SubmittedRun):
    run = stand_in_run
    run.order(steps=20, save_every=5, crash_at=[7], lose=True)
    jobs = run.submit()
    assert run.wait_for_state(jobs["pretrain"], "FAILED", "COMPLETED") == "FAILED"
    assert run.log("pretrain").count("rank 0 of 2 resumes from step 0") == 3
    assert "2 restarts in a row saved no later step" in run.ends("pretrain")[-1].sentence
    for stage in STAGES[1:]:  # rather than waiting for ever
        assert run.wait_for_state(jobs[stage], "CANCELLED", "") in ("CANCELLED", "")
    text = " ".join(run.cli("status", str(run.run)).out.split())
    assert "given up: 2 restarts in a row saved no later step" in text


@pytest.mark.slow
def test_a_crash_that_passes_is_survived(stand_in_run: SubmittedRun):
    run = stand_in_run
    run.order(steps=20, save_every=5, crash_at=[7, 12])
    jobs = run.submit()
    assert run.wait_for_state(jobs["pretrain"], "FAILED", "COMPLETED") == "COMPLETED"
    assert [(end.kind, end.last_saved_step) for end in run.ends("pretrain")] == [("failed", 5), ("failed", 10)]


def test_what_somebody_must_change_is_not_tried_again(stand_in_run: SubmittedRun):
    run = stand_in_run
    run.order(crash_at=[2], code=2)
    jobs = run.submit()
    assert run.wait_for_state(jobs["pretrain"], "FAILED", "COMPLETED") == "FAILED"
    assert run.log("pretrain").count("rank 0 of 2") == 1
    shown = run.slurm.run("scontrol", "show", "job", jobs["pretrain"]).out
    assert "ExitCode=2:0" in shown and "Restarts=0" in shown


def test_cancel_saves_and_nothing_comes_back(stand_in_run: SubmittedRun):
    run = stand_in_run
    run.order(save_every=0, until=GO_ON)
    jobs = run.submit()
    run.wait_for_ranks("pretrain")
    refused = run.cli("submit", *_again(run), check=False)  # while it runs, there is no second one
    assert refused.code == 2 and "has jobs in the queue" in refused.error
    said = run.cli("cancel", str(run.run)).out
    assert (
        f"job {jobs['pretrain']} saves and ends" in said
        and f"cancelled: {jobs['finetune']}, {jobs['swap_head']}" in said
    )
    assert run.record("pretrain").last_saved_step > 0
    assert run.slurm.state(jobs["pretrain"]) == "FAILED"
    assert "cancelled: shardvit submit resumes from step" in run.log("pretrain")
    run.order(steps=5, save_every=0)
    assert run.wait_for_state(run.submit()["pretrain"], "COMPLETED", "FAILED") == "COMPLETED"


@pytest.mark.parametrize("how", ["shardvit cancel --now", "scancel"])
def test_what_is_cancelled_at_once_does_not_come_back(stand_in_run: SubmittedRun, how: str):
    run = stand_in_run
    run.order(until=GO_ON)
    jobs = run.submit()
    run.wait_for(lambda: run.record("pretrain").last_saved_step >= 5, what="checkpoint")
    if how == "scancel":
        run.slurm.run("scancel", jobs["pretrain"])
    else:
        run.cli("cancel", str(run.run), "--now")
    run.wait_for(lambda: not run.slurm.run("squeue", "-h").out.strip(), what="empty queue")
    assert run.slurm.state(jobs["pretrain"]) == "CANCELLED"
    assert "Restarts=0" in run.slurm.run("scontrol", "show", "job", jobs["pretrain"]).out


@pytest.mark.slow
def test_the_real_time_limit(stand_in_run: SubmittedRun):
    """SLURM looks at the clock every half a minute, and counts from a minute on."""
    run = stand_in_run
    run.order(steps=700, save_every=0)
    jobs = run.submit("--signal-seconds", "25", time="1")
    run.wait_for_log("pretrain", "requeued, it resumes from step", patience_seconds=300)
    assert run.record("pretrain").last_saved_step > 0
    assert run.wait_for_state(jobs["pretrain"], "COMPLETED", "FAILED", patience_seconds=240) == "COMPLETED"


def test_processes_that_do_not_stop_go_on_from_their_last_checkpoint(stand_in_run: SubmittedRun):
    run = stand_in_run
    run.order(save_every=5, deaf=True, until=GO_ON)
    jobs = run.submit("--signal-seconds", "6")
    run.wait_for_ranks("pretrain")
    run.wait_for(lambda: run.record("pretrain").last_saved_step, what="checkpoint")
    run.order(steps=10)
    run.slurm.run("scancel", "--signal=USR1", "--batch", jobs["pretrain"])
    run.wait_for_log("pretrain", "requeued, it resumes from step")
    assert run.wait_for_state(jobs["pretrain"], "COMPLETED", "FAILED", "TIMEOUT") == "COMPLETED"
    assert [end.code for end in run.ends("pretrain")] == [128 + signal.SIGKILL]


def test_the_rendered_scripts_pass_sbatch_and_shellcheck(stand_in_run: SubmittedRun, slurm: SlurmCluster):
    run = stand_in_run
    site = run.folder / "site file.toml"
    site.write_text(
        'srun = ["--cpu-bind=none"]\nsetup = ["true"]\n[environment]\nNCCL_DEBUG = "a b\'c"\n'
        '[sbatch]\nlines = ["--comment=a b", "--exclusive"]\n'
    )
    rendered = run.cli(
        *("submit", run.recipe, *run.overrides, "--nodes", "2", "--tasks-per-node", "1", "--time", "1:00:00"),
        *("--site", str(site), "--partition", "high", "--cpus-per-task", "2", "--render"),
    ).out
    scripts = rendered.split("# ---- ")[1:]
    assert len(scripts) == 3 and not run.run.exists()
    for script in scripts:
        command, _, text = script.partition("\n")
        path = Path(command.split()[-1]).name
        (run.folder / path).write_text(text)
        slurm.run("sbatch", "--test-only", run.folder / path)
        if shutil.which("shellcheck"):
            done = subprocess.run(["shellcheck", run.folder / path], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout
    assert "--dependency=afterok:JOB_OF_pretrain --kill-on-invalid-dep=yes" in scripts[1]


def _again(run: SubmittedRun) -> list[str]:
    return [run.recipe, *run.overrides, "--nodes", "2", "--tasks-per-node", "1", "--time", "5"]


def _is_running(job: str) -> bool:
    """Whether a node still runs a job's first step: SLURM's own process for it is the last to end."""
    titles = (" ".join(each.info["cmdline"] or ()).strip() for each in psutil.process_iter(["cmdline"]))
    return f"slurmstepd: [{job}.0]" in titles

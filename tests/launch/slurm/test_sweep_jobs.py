"""`shardvit submit --sweep`: an array of points, then the choice, then the final run; each after what it needs."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.launch.slurm.after import Ending, judge
from shardvit.launch.slurm.cancel import cancel_run
from shardvit.launch.slurm.job_options import JobOptions
from shardvit.launch.slurm.records import End, read_ends, read_submission, write_ends
from shardvit.launch.slurm.script import Paths, Tasks, stage_script, step_script
from shardvit.launch.slurm.site import Site, job_of
from shardvit.launch.slurm.submission import SubmissionPlan, render, submit_plan
from shardvit.launch.slurm.sweep_jobs import plan_sweep_jobs
from shardvit.launch.sweep import step
from shardvit.launch.sweep.points import Sweep, plan_sweep
from shardvit.launch.sweep.record import show_progress
from shardvit.pipeline.recipe.io import parse_recipe
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.runs.run_folder import RunFolder
from tests.launch.machine import each_once, on_shards
from tests.launch.slurm.fake_slurm import FakeSlurm

JOB = job_of(JobOptions(nodes=2, tasks_per_node=2, time="1:00:00"), site=Site())
LR = "stages.finetune.optimizer.lr"


@pytest.fixture(autouse=True)
def _without_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "log_to_mlflow", lambda sweep, record, status: None)


def sweep_of(*overrides: str) -> Sweep:
    changes = tuple(each_once("processes=auto", *on_shards(Path("shards")), *overrides))
    return plan_sweep("digits", changes, runs_root=Path("runs"), hold_out=0.1)


def plan(*overrides: str, at_once: int | None = None) -> SubmissionPlan:
    return plan_sweep_jobs(sweep_of(*overrides), job=JOB, at_once=at_once)


def done(folder: RunFolder, *stages: StageName, score: float = 0.5) -> None:
    for stage in stages:
        results = {"val/top1": score, "val/loss": 1.0, "val/images": 10.0}
        folder.update(stage, state="done", results={} if stage == "swap_head" else results)


def test_the_jobs_and_what_each_waits_for(work: Path):
    slurm, planned = FakeSlurm(), plan(f"{LR}=0.01,0.3,0.02", at_once=2)
    submission = submit_plan(planned, slurm=slurm)
    assert list(zip(submission.jobs, slurm.submitted, slurm.how, strict=True))[1:] == [
        ("swap_head", ("swap_head.sbatch", "101"), "afterok"),
        ("finetune", ("finetune.sbatch", "102"), "aftercorr"),
        ("choose", ("choose.sbatch", "103"), "afterany"),
        ("final-swap_head", ("swap_head.sbatch", "104"), "afterok"),
        ("final-finetune", ("finetune.sbatch", "105"), "afterok"),
        ("sum-up", ("sum-up.sbatch", "106"), "afterany"),
    ]
    assert slurm.submitted[0] == ("pretrain.sbatch", None)
    root = work / "runs" / "digits-sweep"
    array = (root / "slurm" / "finetune.sbatch").read_text()
    assert "#SBATCH --array=0-2%2" in array and f"--output={root}/slurm/finetune-%a.log" in array
    own = read_submission(root / "lr-0.3" / "slurm")
    assert own is not None and own.jobs == {"swap_head": "102_1", "finetune": "103_1"}
    assert parse_recipe(root / "lr-0.3" / "slurm" / "recipe.yaml").processes == 4
    with pytest.raises(UserError, match="101"):
        submit_plan(plan(f"{LR}=0.01,0.3,0.02"), slurm=slurm)


def test_what_is_rendered_is_what_is_submitted_and_nothing_is_written_before(work: Path):
    planned = plan(f"{LR}=0.01,0.3")
    text = render(planned.jobs)
    assert not (work / "runs").exists() and "aftercorr:JOB_OF_swap_head" in text
    submit_plan(planned, slurm=FakeSlurm())
    for each in planned.jobs:
        assert each.script.read_text() == each.text and each.text in text


def test_a_refused_job_takes_the_others_back(work: Path):
    slurm = FakeSlurm(refuse=3)
    with pytest.raises(UserError, match="account"):
        submit_plan(plan(f"{LR}=0.01,0.3"), slurm=slurm)
    assert slurm.cancelled == ["101", "102"]


def test_the_choice_prepares_the_final_run_and_the_sum_has_its_result(work: Path, capsys: pytest.CaptureFixture[str]):
    submit_plan(plan(f"{LR}=0.01,0.3,0.02"), slurm=FakeSlurm())
    root = work / "runs" / "digits-sweep"
    sweep = step.read_sweep(root)
    (shared,) = sweep_of(f"{LR}=0.01,0.3,0.02").shared_stages
    shared.folder.open(shared.recipe.model_copy(update={"processes": 4}))
    done(sweep.shared_stages[0].folder, "pretrain")
    for name, score in (("lr-0.01", 0.5), ("lr-0.3", 0.75)):  # the third has failed
        done(sweep.folder(name), "swap_head", "finetune", score=score)
    assert step.main([str(root), "--do", "choose"]) == 0
    final = sweep.folder("final")
    recipe = parse_recipe(final.path / "slurm" / "recipe.yaml")
    assert recipe.train_stage("finetune").optimizer.lr == 0.3 and recipe.processes == 4
    assert final.record("pretrain").state == "done" and recipe.train_stage("finetune").eval.part is None  # pyright: ignore[reportOptionalMemberAccess]
    assert step.main([str(root), "--do", "sum-up"]) == 1, "the final run is not done"
    done(final, "swap_head", "finetune", score=0.875)
    capsys.readouterr()
    assert step.main([str(root), "--do", "sum-up"]) == 0
    out = capsys.readouterr().out
    assert "0.8750" in out and "0.7500" in out and "failed" in out
    assert "lr-0.3" in show_progress(root, form="text") and "chosen" in show_progress(root, form="text")
    again = plan(f"{LR}=0.01,0.3,0.02")
    assert [job.name for job in again.jobs][:2] == ["swap_head", "finetune"], "pre-training is done"
    assert "runs=(lr-0.02 )" in again.jobs[0].text
    done(sweep.folder("lr-0.02"), "swap_head", "finetune", score=1.0)
    assert step.main([str(root), "--do", "choose"]) == 0
    recipe = parse_recipe(final.path / "slurm" / "recipe.yaml")
    assert recipe.train_stage("finetune").optimizer.lr == 0.02 and final.peek("finetune").state == "new"


def test_a_point_that_gave_up_begins_with_all_its_restarts(work: Path):
    slurm = work / "runs" / "digits-sweep" / "lr-0.3" / "slurm"
    write_ends(slurm, "finetune", [End("7", 0.0, "failed", 1, 0, "it crashed")])
    submit_plan(plan(f"{LR}=0.01,0.3"), slurm=FakeSlurm())
    assert read_ends(slurm, "finetune") == []


def test_without_a_point_that_is_done_there_is_no_final_run(work: Path):
    submit_plan(plan(f"{LR}=0.01,0.3"), slurm=FakeSlurm())
    root = work / "runs" / "digits-sweep"
    assert step.main([str(root), "--do", "choose"]) == 1 and not (root / "final" / "recipe.yaml").exists()
    (root / "sweep.json").write_text("{")
    assert step.main([str(root), "--do", "choose"]) == 2


def test_a_task_of_a_cancelled_array_is_not_requeued(work: Path):
    slurm = FakeSlurm()
    submit_plan(plan(f"{LR}=0.01,0.3"), slurm=slurm)
    root = work / "runs" / "digits-sweep"
    ending = Ending("103_1", code=75, signal="USR1", queue="RUNNING/None")
    RunFolder(runs_root=root, name="lr-0.3").update("finetune", state="running", last_saved_step=5)
    assert judge(root / "lr-0.3", stage="finetune", ending=ending, max_restarts=1).code == 75
    assert cancel_run(root, slurm=slurm, how="now", say=lambda text: None) == 7
    assert judge(root / "lr-0.3", stage="finetune", ending=ending, max_restarts=1).code == 1


def scripts(root: str) -> dict[str, str]:
    paths = Paths(run=Path(root), work=Path("/w d"), package=Path("/p"))
    tasks = Tasks(["lr-0.1", "x-1"], at_once=3)
    return {
        "array": stage_script("finetune", job=JOB, paths=paths, tasks=tasks),
        "swap_head": stage_script("swap_head", job=JOB, paths=paths, tasks=tasks),
        "step": step_script(
            "choose", ["-m", "shardvit.launch.sweep.step", root, "--do", "choose"], job=JOB, paths=paths
        ),
    }


@pytest.mark.parametrize("name", ["array", "swap_head", "step"])
def test_bash_understands_it(name: str, tmp_path: Path):
    script = tmp_path / "script"
    script.write_text(scripts("/runs/a b'c")[name])
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        told = subprocess.run(["shellcheck", script], capture_output=True, text=True, check=False)
        assert told.returncode == 0, told.stdout


@pytest.mark.parametrize("task", [0, 1])
def test_a_task_trains_and_judges_its_own_run(tmp_path: Path, task: int):
    """The array's script in bash, with stand-ins that write down how they were called."""
    programs, root = tmp_path / "bin", tmp_path / "a b'c"
    programs.mkdir()
    for name in ("srun", "squeue", "scontrol", "python3"):
        path = programs / name
        path.write_text(
            f'#!/bin/bash\nprintf "%s|" {name} "$@" >> "{tmp_path}/said"; echo >> "{tmp_path}/said"\necho R/N\n'
        )
        path.chmod(0o755)
    job = job_of(JobOptions(nodes=1, tasks_per_node=1, time="1:00:00"), site=Site(python="python3"))
    paths = Paths(run=root, work=tmp_path, package=None)
    script = tmp_path / "script"
    script.write_text(stage_script("finetune", job=job, paths=paths, tasks=Tasks(["one", "two"])))
    ids = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(task), "SLURM_JOB_NODELIST": "n"}
    subprocess.run(["bash", script], env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **ids}, check=True)
    srun, squeue, after = ((tmp_path / "said").read_text().splitlines())[:3]
    run = str(root / ("one", "two")[task])
    assert f"|shardvit.launch.train|{run}/slurm/recipe.yaml|--stage|finetune|--runs|{root}|" in srun
    assert f"|--jobs=7_{task}|" in squeue
    assert f"|shardvit.launch.slurm.after|{run}|--stage|finetune|" in after and f"|--job|7_{task}|" in after
    assert shlex.quote(str(root)) in script.read_text()


def test_what_why_without_a_sweep_is_refused(work: Path):
    from shardvit.launch.commands.training.submit import submit

    for flags in ({"hold_out": "1%"}, {"stage": "finetune"}, {"at_once": 2}):
        with pytest.raises(UserError, match="--sweep"):
            submit("digits", options=JOB.options, **flags)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="--at-once"):
        plan(f"{LR}=0.01,0.3", at_once=0)

"""Real training on a real SLURM, submitted by `shardvit submit`: interrupted in every way, and nothing is lost."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from shardvit.pipeline.recipe.vocabulary import StageName
from tests.cluster.conftest import ROOT, SubmittedRun
from tests.cluster.slurm_cluster import SlurmCluster
from tests.faults.harness import INJECT, Case, Fault, pack_shards, recipe
from tests.left_behind import mlflow_states, surprises
from tests.small_recipe import curve
from tests.traps import lay_traps

STAGES: tuple[StageName, ...] = ("pretrain", "swap_head", "finetune")
STEPS = 120  # 10 seconds: time enough to interrupt it
NewRun = Callable[..., SubmittedRun]


def content(shards: Path, *, steps: int = STEPS, **changes: Any) -> dict[str, Any]:
    """The fault suite's recipe, with a head swap and a short fine-tuning behind it."""
    whole = recipe(shards, {"processes": "auto", "stages.pretrain.duration": f"{steps} steps", **changes})
    tuned = {**whole["stages"]["pretrain"], "duration": "8 steps", "save_every": "4 steps", "augment": {}}
    whole["stages"] |= {"swap_head": {}, "finetune": tuned}
    return whole


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_shards(tmp_path_factory.mktemp("shards") / "digits")


def make_run(
    slurm: SlurmCluster, folder: Path, recipe_content: dict[str, Any], *, python: Path = Path(sys.executable)
) -> SubmittedRun:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe_content))
    return SubmittedRun(slurm, folder, python, "recipe.yaml", [], str(recipe_content["name"]))


def python_with(fault: Fault, path: Path) -> Path:
    """A Python into whose processes a fault is put."""
    path.write_text(
        f"#!/bin/bash\nexport PYTHONPATH={INJECT}:{ROOT}\n"
        f"export SHARDVIT_FAULT={shlex.quote(json.dumps([fault]))}\n"
        f'exec {sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    return path


def finish(run: SubmittedRun, jobs: dict[str, str], *, patience_seconds: float = 300.0) -> None:
    """Wait for each stage."""
    for job in jobs.values():
        ended = run.wait_for_state(job, "COMPLETED", "FAILED", "CANCELLED", patience_seconds=patience_seconds)
        assert ended == "COMPLETED"


@pytest.fixture(scope="module")
def undisturbed(
    _slurm: SlurmCluster, shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., SubmittedRun]:
    """The same recipe with nothing in its way, on the same cluster; each once."""
    done: dict[int, SubmittedRun] = {}

    def make(steps: int = STEPS) -> SubmittedRun:
        if steps not in done:
            run = make_run(_slurm, tmp_path_factory.mktemp("undisturbed"), content(shards, steps=steps))
            finish(run, run.submit())
            done[steps] = run
        return done[steps]

    return make


def is_the_same(run: SubmittedRun, other: SubmittedRun) -> None:
    """Asserts that every stage came to the same end, to the last bit, in one MLflow run."""
    for stage in STAGES:
        ours, theirs = run.record(stage), other.record(stage)
        assert ours.state == "done", run.log(stage)
        assert curve(run.run / stage) == curve(other.run / stage)
        assert (ours.results, ours.model_digest) == (theirs.results, theirs.model_digest)
    assert mlflow_states(run.run.parent / "mlflow.db") == {stage: ["FINISHED"] for stage in ("", *STAGES)}


def wait_for_checkpoint(run: SubmittedRun, step: int = 20) -> None:
    run.wait_for(lambda: run.record("pretrain").last_saved_step >= step, what="checkpoint", patience_seconds=300)


@pytest.mark.slow
def test_a_requeue_in_the_middle_of_training_changes_no_bit(slurm: SlurmCluster, shards: Path, tmp_path: Path):
    """The short form of the next one: two stages of few steps, and a job that is held until it is requeued."""
    expected = Case(tmp_path / "undisturbed", shards, changes={"stages.pretrain.duration": "24 steps"})
    ended = expected.start().wait()
    assert ended.code == 0, ended.output
    hold = expected.fault("hold", "between_steps", step=12)
    python = python_with(hold, tmp_path / "python")
    whole = content(shards, steps=24)
    del whole["stages"]["swap_head"]
    whole["stages"]["finetune"]["start"] = "scratch"
    run = make_run(slurm, tmp_path / "run", whole, python=python)
    sprung = lay_traps(run.folder)
    jobs = run.submit()
    run.wait_for(Path(hold["once"]).exists, what="step 12")
    slurm.run("scontrol", "requeue", jobs["pretrain"])
    Path(hold["release"]).touch()
    finish(run, jobs)
    assert "requeued 1 times" in run.log("pretrain") and "resuming from" in run.log("pretrain")
    record = expected.record()
    assert curve(run.run / "pretrain") == expected.curve()
    assert run.record("pretrain").model_digest == record["model_digest"]
    assert run.record("pretrain").results == record["results"]
    assert run.record("finetune").state == "done" and surprises(run.run) == [] and sprung() == []
    assert mlflow_states(run.run.parent / "mlflow.db") == {
        stage: ["FINISHED"] for stage in ("", "pretrain", "finetune")
    }


@pytest.mark.slow
@pytest.mark.parametrize("what", ["scontrol requeue", "node down", "preemption", "kill -9 of a process"])
def test_what_takes_the_nodes_away_loses_nothing(
    slurm: SlurmCluster, shards: Path, tmp_path: Path, undisturbed: NewRun, what: str
):
    expected = undisturbed()
    run = make_run(slurm, tmp_path / "a b", content(shards))
    jobs = run.submit("--partition", "low")
    wait_for_checkpoint(run)
    match what:
        case "scontrol requeue":
            slurm.run("scontrol", "requeue", jobs["pretrain"])
        case "node down":
            slurm.run("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
            run.wait_for_state(jobs["pretrain"], "PENDING")
            slurm.run("scontrol", "update", "NodeName=node2", "State=RESUME", check=False)
        case "preemption":
            urgent = tmp_path / "urgent.sh"
            urgent.write_text("#!/bin/bash\nsleep 1\n")
            high = slurm.run("sbatch", "--parsable", "-p", "high", "-N2", "--exclusive", urgent).out.strip()
            run.wait_for_state(high, "COMPLETED")
        case "kill -9 of a process":
            run.kill_a_rank()
            run.wait_for_log("pretrain", "requeued, it resumes from step", patience_seconds=300)
    finish(run, jobs)
    assert "requeued 1 times" in run.log("pretrain") and "resuming from" in run.log("pretrain")
    is_the_same(run, expected)
    stages = json.loads(run.cli("status", str(run.run), "--json").out)["stages"]
    assert [(stage["state"], stage["restarts"]) for stage in stages[1:]] == [("done", 0), ("done", 0)]
    assert stages[0]["step"] == stages[0]["total_steps"] == STEPS


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_time_limit_shorter_than_the_run(slurm: SlurmCluster, shards: Path, tmp_path: Path, undisturbed: NewRun):
    steps = 1800  # 100 s, so that a faster machine, too, needs more than the 50 s of a job
    expected = undisturbed(steps)
    run = make_run(slurm, tmp_path, content(shards, steps=steps))
    jobs = run.submit("--signal-seconds", "10", time="1")
    finish(run, jobs, patience_seconds=1500)
    assert all(end.kind == "stopped" for end in run.ends("pretrain")) and run.ends("pretrain"), run.log("pretrain")
    is_the_same(run, expected)


def bare(folder: Path, *lines: str) -> Path:
    """A batch script that somebody wrote by hand."""
    script = folder / "by_hand.sh"
    script.write_text("\n".join(["#!/bin/bash", f"export PYTHONPATH={ROOT} DS_ACCELERATOR=cpu", *lines, ""]))
    return script


@pytest.mark.parametrize(
    ("tasks", "variables", "sentence"),
    [
        pytest.param(
            *(3, "", "stages.pretrain.global_batch_size 32 does not divide among 3 processes"), marks=pytest.mark.slow
        ),
        (2, "WORLD_SIZE=8 ", "WORLD_SIZE is 8, but srun started 2 tasks"),
    ],
)
def test_a_wrong_number_of_tasks_is_one_sentence(
    slurm: SlurmCluster, shards: Path, tmp_path: Path, tasks: int, variables: str, sentence: str
):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content(shards)))
    sprung = lay_traps(tmp_path)
    srun = f"{variables}srun --ntasks={tasks} {sys.executable} -m shardvit.launch.train recipe.yaml --stage pretrain"
    script = bare(tmp_path, srun, 'echo "exit code $?"')
    # On one node: each node says what may be wrong with its disks.
    asked = ("--nodes=1", f"--ntasks={tasks}", "--overcommit", f"--output={tmp_path}/log", f"--chdir={tmp_path}")
    job = slurm.run("sbatch", "--parsable", *asked, script).out.strip()
    slurm.wait_until(lambda: slurm.state(job) in ("COMPLETED", "FAILED"), what="end")
    said = (tmp_path / "log").read_text()
    assert said.count("shardvit: ") == 1 and sentence in said and "exit code 2" in said, said
    assert sprung() == []


@pytest.mark.slow
def test_an_array_of_two_runs_without_a_word_about_where_they_meet(slurm: SlurmCluster, shards: Path, tmp_path: Path):
    only = cast("dict[str, Any]", recipe(shards, {"stages.pretrain.duration": "10 steps", "processes": "auto"}))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(only))
    train = f"srun --ntasks=2 {sys.executable} -m shardvit.launch.train recipe.yaml --stage pretrain"
    script = bare(tmp_path, f"{train} name=run-$SLURM_ARRAY_TASK_ID seed=$SLURM_ARRAY_TASK_ID")
    asked = ("--nodes=1", "--ntasks=2", "--array=0-1", f"--output={tmp_path}/log-%a", f"--chdir={tmp_path}")
    job = slurm.run("sbatch", "--parsable", *asked, script).out.strip()
    slurm.wait_until(lambda: not slurm.run("squeue", "-h", f"--jobs={job}", check=False).out.strip(), what="end")
    weights = set()
    for task in (0, 1):
        stage = tmp_path / f"runs/run-{task}/pretrain"
        assert (stage / "stage.json").exists(), (tmp_path / f"log-{task}").read_text()
        record = json.loads((stage / "stage.json").read_text())
        assert record["state"] == "done", (tmp_path / f"log-{task}").read_text()
        assert "2 processes" in (tmp_path / f"log-{task}").read_text()
        weights.add(record["model_digest"])
    assert len(weights) == 2

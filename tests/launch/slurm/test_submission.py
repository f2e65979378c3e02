"""`shardvit submit`: checked before anything is submitted, chained, taken back when SLURM refuses."""

import os
from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.launch.bench.scale_ranks import counting
from shardvit.launch.slurm.job_options import JobOptions
from shardvit.launch.slurm.records import read_submission, write_cancelled, write_ends
from shardvit.launch.slurm.site import Site, SlurmJob, job_of
from shardvit.launch.slurm.submission import SubmissionPlan, plan_submission, render, submit_plan
from shardvit.pipeline.recipe.io import load_recipe, parse_recipe
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.runs.run_folder import RunFolder
from tests.launch.machine import each_once, make_shards, on_shards
from tests.launch.slurm.fake_slurm import FakeSlurm

JOB = job_of(JobOptions(nodes=2, tasks_per_node=2, time="1:00:00"), site=Site())


def recipe(*overrides: str) -> Recipe:
    changes = each_once("processes=auto", *on_shards(Path("shards")), *overrides)
    return load_recipe("digits", overrides=tuple(changes))


def plan(*overrides: str, job: SlurmJob = JOB) -> SubmissionPlan:
    return plan_submission(recipe(*overrides), runs_root=Path("runs"), job=job)


def test_one_job_for_each_stage_each_after_the_one_before(work: Path):
    slurm = FakeSlurm()
    submission = submit_plan(plan(), slurm=slurm)
    assert slurm.submitted == [("pretrain.sbatch", None), ("swap_head.sbatch", "101"), ("finetune.sbatch", "102")]
    assert submission == read_submission(work / "runs/digits/slurm")
    assert submission.jobs == {"pretrain": "101", "swap_head": "102", "finetune": "103"}
    assert submission.total_steps == {"pretrain": 800, "finetune": 50}
    submitted = parse_recipe(work / "runs/digits/slurm/recipe.yaml")
    assert submitted.processes == 4 and submitted.stages.pretrain is not None


def test_what_is_rendered_is_what_is_submitted(work: Path):
    planned = plan()
    text = render(planned.jobs)
    assert not (work / "runs").exists()
    submit_plan(planned, slurm=FakeSlurm())
    for stage in ("pretrain", "swap_head", "finetune"):
        assert (work / f"runs/digits/slurm/{stage}.sbatch").read_text() in text
    assert text.index("sbatch --parsable " + str(work)) < text.index("afterok:JOB_OF_pretrain")
    assert f"#SBATCH --chdir={os.getcwd()}" in text


def test_jobs_of_a_hard_linked_copy_append_to_logs_of_its_own(work: Path):
    log = work / "runs/digits/slurm/pretrain.log"
    log.parent.mkdir(parents=True)
    log.write_text("before\n")
    os.link(log, work / "original.log")
    submit_plan(plan(), slurm=FakeSlurm())
    with log.open("a") as file:
        file.write("after\n")
    assert ((work / "original.log").read_text(), log.read_text()) == ("before\n", "before\nafter\n")


def test_finished_stages_are_left_out(work: Path):
    folder = RunFolder(runs_root=work / "runs", name="digits")
    folder.open(recipe())
    for stage in ("pretrain", "swap_head"):
        folder.update(stage, state="done")
    slurm = FakeSlurm()
    submit_plan(plan(), slurm=slurm)
    assert slurm.submitted == [("finetune.sbatch", None)]
    folder.update("finetune", state="done")
    assert plan().jobs == ()


def test_while_jobs_are_in_the_queue_there_are_no_others(work: Path):
    slurm = FakeSlurm()
    submit_plan(plan(), slurm=slurm)
    with pytest.raises(UserError, match=r"has jobs in the queue \(101, 102, 103\).*shardvit cancel"):
        submit_plan(plan(), slurm=slurm)
    slurm.cancel(list(slurm.states))
    assert submit_plan(plan(), slurm=slurm).jobs["pretrain"] == "104"


def test_a_new_submission_begins_with_a_clean_record(work: Path):
    slurm = work / "runs/digits/slurm"
    write_cancelled(slurm, {"101"})
    write_ends(slurm, "pretrain", [])
    (slurm / "pretrain.ends.json").write_text('[{"job": "1"}]')
    submit_plan(plan(), slurm=FakeSlurm())
    assert (slurm / "cancelled.json").read_text().split() == ["[]"]
    assert (slurm / "pretrain.ends.json").read_text().split() == ["[]"]


def test_when_slurm_refuses_a_job_those_before_it_are_taken_back(work: Path):
    slurm = FakeSlurm(refuse=3)
    with pytest.raises(UserError, match="Invalid account"):
        submit_plan(plan(), slurm=slurm)
    assert slurm.cancelled == ["101", "102"]
    slurm.refuse = 0
    submit_plan(plan(), slurm=slurm)


@pytest.mark.parametrize(
    ("override", "job", "named"),
    [
        ("processes=3", JOB, "processes is 3, but 2 nodes with 2 processes each make 4"),
        ("seed=0", job_of(JobOptions(nodes=3, tasks_per_node=1, time="1:00:00"), site=Site()), "among 3 processes"),
        ("engine.precision=fp16", JOB, "fp16 needs a GPU"),
        ("stages.finetune.train=nowhere", JOB, "nowhere"),
        ("stages.pretrain.duration=0 steps", JOB, "stages.pretrain.duration"),
    ],
)
def test_what_would_keep_a_stage_from_running_is_said_before_anything_is_submitted(
    work: Path, override: str, job: SlurmJob, named: str
):
    with pytest.raises(UserError, match=named):
        plan(override, job=job)
    assert not (work / "runs").exists()


def test_a_recipe_for_gpus_may_be_submitted_from_a_machine_without_any(work: Path):
    gpus = job_of(JobOptions(nodes=2, gpus_per_node=8, time="1:00:00"), site=Site())
    assert "--gpus-per-node=8" in plan("engine.precision=fp16", job=gpus).jobs[0].text


def test_another_recipe_in_the_same_run_is_refused(work: Path):
    RunFolder(runs_root=work / "runs", name="digits").open(recipe())
    with pytest.raises(UserError, match="the recipe differs"):
        plan("seed=5")


def of_nodes(nodes: int) -> SlurmJob:
    return job_of(JobOptions(nodes=nodes, gpus_per_node=8, time="1:00:00"), site=Site())


LARGE = [
    f"stages.{stage}.{key}"
    for stage in ("pretrain", "finetune")
    for key in ("global_batch_size=1024", "train=large/train")
]


def test_128_nodes_of_8_gpus_get_the_script_of_one_node(work: Path):
    """Nothing in it, and nothing that is done here, grows with the processes; each node has a task for each GPU."""
    make_shards(work / "large" / "train", images=1_000_000)
    operations: list[int] = []
    scripts: list[dict[str, str]] = []
    for nodes in (1, 128):
        job, slurm = of_nodes(nodes), FakeSlurm()
        with counting(work) as counter:
            submission = submit_plan(plan(*LARGE, f"name=on-{nodes}", job=job), slurm=slurm)
        operations.append(counter.operations)
        assert len(slurm.submitted) == 3 and submission.processes == 8 * nodes
        assert parse_recipe(work / f"runs/on-{nodes}/slurm/recipe.yaml").processes == 8 * nodes
        scripts.append({path.name: path.read_text() for path in (work / f"runs/on-{nodes}/slurm").glob("*.sbatch")})
    assert operations[1] <= operations[0] < 150  # the first one makes folders, too
    few, many = scripts
    lines = many["pretrain.sbatch"].splitlines()
    assert {"#SBATCH --nodes=128", "#SBATCH --ntasks-per-node=8", "#SBATCH --gpus-per-node=8"} <= set(lines)
    assert "srun --nodes=128 --ntasks=1024 --distribution=block" in many["pretrain.sbatch"]
    sizes = (("--nodes=128", "--nodes=1"), ("--ntasks=1024", "--ntasks=8"), ("on-128", "on-1"))
    for name, text in many.items():
        for there, here in sizes:
            text = text.replace(there, here)
        assert text == few[name]


def test_what_1024_processes_cannot_share_is_said_before_anything_is_submitted(work: Path):
    make_shards(work / "large" / "train", images=1_000_000)
    for overrides, named in (
        ([], "global_batch_size"),
        ([*LARGE, "data.lanes=64"], "data.lanes"),
    ):
        with pytest.raises(UserError, match=named) as refused:
            plan(*overrides, job=of_nodes(128))
        assert "1024" in str(refused.value).replace(",", "") and "\n" not in str(refused.value)
    assert not (work / "runs").exists()

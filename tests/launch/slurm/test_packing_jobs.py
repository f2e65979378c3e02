"""`submit --pack`: scripts, what is left to do, how far it is; on a real SLURM: tests/cluster/test_packing.py."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.pack import pack
from shardvit.launch.commands.data.pack import PackOptions
from shardvit.launch.slurm.commands import Slurm
from shardvit.launch.slurm.job_options import JobOptions
from shardvit.launch.slurm.packing_jobs import jobs_folder, packing_of, plan_packing_jobs
from shardvit.launch.slurm.script import Paths, packing_script
from shardvit.launch.slurm.site import Site, SlurmJob, job_of, read_site
from shardvit.launch.watch.packing import PackingWatcher, as_text
from tests.conftest import RunCli

OPTIONS: dict[str, Any] = {"holdout": 0.2, "samples_per_shard": 100, "name": "d", "report": lambda line: None}
FLAGS = ["--name=d", "--holdout=0.2", "--samples-per-shard=100"]
TYPED = ["--pack", "digits", "set", *FLAGS, "--tasks", "4", "--time", "1:00:00"]


def job(**options: Any) -> SlurmJob:
    return job_of(JobOptions(tasks_per_node=1, time="1:00:00", **options), site=read_site(None))


def arguments_of(words: list[str]) -> PackOptions:
    app, found = App(), list[PackOptions]()

    @app.default
    def take(*, options: PackOptions = PackOptions()) -> None:  # noqa: B008
        found.append(options)

    app(words, result_action="return_value")
    return found[0]


@pytest.mark.parametrize(
    "options",
    [
        PackOptions(),
        PackOptions(name="-odd name", holdout=0.25, seed=7, drop_duplicates=True, skip_unreadable=True, verify=True),
        PackOptions(labels=Path("a b.csv"), exclude_matches_of=["one", "two three"], shard_size="256MB", where="a < 1"),
    ],
)
def test_flags_are_typed_again_as_they_were(options: PackOptions):
    assert arguments_of(options.arguments()) == options


def test_a_chain_of_plan_array_and_finish(tmp_path: Path, run_cli: RunCli):
    done = run_cli("submit", *TYPED, "--cpus-per-task", "8", "--at-once", "3", "--render", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan, shards, finish = done.stdout.split("# ---- sbatch ")[1:]
    for text in (plan, shards, finish):
        assert {"#SBATCH --nodes=1", "#SBATCH --time=01:00:00", "#SBATCH --requeue"} <= set(text.splitlines())
        assert (
            "-m shardvit.launch.cli pack digits set --name=d --holdout=0.2 --samples-per-shard=100 --workers=8" in text
        )
        script = text.partition("\n")[2]
        assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False).stderr == ""
    assert "--array" not in plan + finish and "#SBATCH --array=0-3%3" in shards.splitlines()
    assert '--step shards --of 4 --task "$SLURM_ARRAY_TASK_ID" &' in shards
    assert "--dependency=afterok:JOB_OF_plan" in shards and "--dependency=afterok:JOB_OF_shards" in finish
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("step", "code", "is_requeued"),
    [
        ("exit 0", 0, False),
        ("exit 2", 2, False),  # a mistake
        ("exit 75", 75, True),
        ("kill -KILL $$", 75, True),
        (
            "trap 'exit 75' TERM; kill -USR1 $PPID; for i in {1..600}; do sleep 0.05; done; exit 9",
            75,
            True,
        ),  # before the time limit
        (
            "trap 'exit 0' TERM; kill -USR1 $PPID; for i in {1..600}; do sleep 0.05; done; exit 9",
            0,
            False,
        ),  # just done then
    ],
)
def test_what_a_signal_ended_is_requeued(tmp_path: Path, step: str, code: int, is_requeued: bool):
    for name, text in (("python", step), ("scontrol", f"echo $* > '{tmp_path}/requeued'")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    site = Site(python=str(tmp_path / "python"))
    paths = Paths(run=tmp_path, work=tmp_path, package=None)
    asked = job_of(JobOptions(tasks_per_node=1, time="1:00:00"), site=site)
    script = packing_script("plan", ["pack"], job=asked, paths=paths)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_JOB_NODELIST": "node"}
    done = subprocess.run(["bash", "-c", script], env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, (tmp_path / "requeued").exists()) == (code, is_requeued), done.stderr


def test_what_is_done_is_not_submitted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def left(*flags: str) -> list[str]:
        plan = plan_packing_jobs("digits", "set", [*FLAGS, *flags], tasks=4, at_once=None, runs=Path("runs"), job=job())
        plan.begin()
        array = [
            line.partition("--array=")[2] for each in plan.jobs for line in each.text.splitlines() if "--array=" in line
        ]
        return [each.name for each in plan.jobs] + array

    everything = ["plan", "shards", "finish", "0-3"]
    assert left() == everything
    pack("digits", "set", **OPTIONS, step="plan")
    assert left("--seed=1") == everything  # other flags, another plan
    assert left() == everything and left() == ["shards", "finish", "0-3"]
    pack("digits", "set", **OPTIONS, step="shards", task=1, of=4)
    assert left() == ["shards", "finish", "0,2-3"]
    for task in (0, 2, 3):
        pack("digits", "set", **OPTIONS, step="shards", task=task, of=4)
    assert left() == ["finish"]
    pack("digits", "set", **OPTIONS, step="finish")
    assert left() == []


def test_how_far_a_packing_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    out = Path("set")
    assert not PackingWatcher(out, slurm=Slurm()).is_one
    pack("digits", out, **OPTIONS, step="plan")
    assert PackingWatcher(out, slurm=Slurm()).look() | {"out": ""} == {
        **{"out": "", "state": "packing", "shards": 0, "of_shards": 19, "images": 0, "of_images": 1797},
        **{"images_per_second": 0.0, "left_seconds": None},
    }
    pack("digits", out, **OPTIONS, step="shards", task=1, of=4)
    pack("digits", out, **OPTIONS, step="shards", task=2, of=4)
    seen = PackingWatcher(out, slurm=Slurm()).look()
    assert (seen["shards"], seen["images"]) == (10, 945)
    assert seen["images_per_second"] > 0 and f"{seen['shards']} of 19 shards, 945 of 1,797 images" in as_text(seen)
    for task in (0, 3):
        pack("digits", out, **OPTIONS, step="shards", task=task, of=4)
    pack("digits", out, **OPTIONS, step="finish")
    assert PackingWatcher(out, slurm=Slurm()).is_one
    plan = plan_packing_jobs("digits", "set", FLAGS, tasks=4, at_once=None, runs=Path("runs"), job=job())
    plan.begin()
    assert PackingWatcher(Path("set.jobs"), slurm=Slurm()).look()["state"] == "packed"


def test_a_packing_is_found_by_out_and_by_its_jobs(tmp_path: Path):
    out = tmp_path / "set"
    assert packing_of(out) is None
    jobs = jobs_folder(str(out), runs=tmp_path)
    jobs.mkdir()
    (jobs / "packing.json").write_text(json.dumps({"out": str(out)}))
    assert packing_of(out) == packing_of(jobs) == (jobs, str(out))
    assert jobs_folder("s3://bucket/photos/", runs=tmp_path) == tmp_path / "photos.jobs"
    (jobs / "packing.json").write_text("[]")
    with pytest.raises(UserError, match="damaged"):
        packing_of(out)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["digits", "--tasks", "3"], "--pack"),
        (["digits", "--drop-duplicates"], "--pack"),
        (["--pack", "digits", "set"], "--tasks"),
        (["--pack", "digits", "--tasks", "3"], "OUT"),
        (["--pack", "digits", "set", "--tasks", "0"], "--tasks"),
        (["--pack", "digits", "set", "--tasks", "3", "--nodes", "2"], "one node"),
        (["--pack", "digits", "set", "--tasks", "3", "--quality", "80"], "--quality"),
    ],
)
def test_mistakes(words: list[str], named: str, tmp_path: Path, run_cli: RunCli):
    done = run_cli("submit", *words, "--time", "1:00:00", cwd=tmp_path)
    assert done.returncode == 2 and named in done.stderr
    assert not list(tmp_path.iterdir())

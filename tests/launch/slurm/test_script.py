"""The batch script: what is asked of SLURM in it, and that nothing in it is taken for shell code."""

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.launch.slurm.job_options import JobOptions
from shardvit.launch.slurm.script import Paths, stage_script
from shardvit.launch.slurm.site import Site, SlurmJob, job_of
from shardvit.pipeline.recipe.vocabulary import StageName

OPTIONS = JobOptions(nodes=4, gpus_per_node=8, time="25:00:00")
JOB = job_of(OPTIONS, site=Site())
NASTY = "/runs/a b$(touch x)`'\"%j"


def paths(root: str = "/runs") -> Paths:
    run = Path(root) / "law"
    return Paths(run=run, work=Path("/w d"), package=Path("/p"))


def options(text: str) -> dict[str, str]:
    words = [shlex.split(line.removeprefix("#SBATCH "))[0] for line in text.splitlines() if line.startswith("#SBATCH")]
    return {word.partition("=")[0]: word.partition("=")[2] for word in words}


def words_of(text: str, command: str) -> list[str]:
    """The words of the command that begins with `command`."""
    lines = text.replace("\\\n", " ").splitlines()
    return shlex.split(next(line for line in lines if line.startswith(command)))


def site(**content: Any) -> SlurmJob:
    read = Site.model_validate(content)
    return job_of(OPTIONS, site=read)


def asking(**changes: Any) -> SlurmJob:
    return job_of(replace(OPTIONS, **changes), site=Site())


def test_what_is_asked_of_slurm():
    asked = options(stage_script("pretrain", job=asking(partition="gpu", qos="long"), paths=paths()))
    assert asked == {
        "--job-name": "law-pretrain",
        "--nodes": "4",
        "--ntasks-per-node": "8",
        "--gpus-per-node": "8",
        "--time": "1-01:00:00",
        "--partition": "gpu",
        "--qos": "long",
        "--chdir": "/w d",
        "--output": "/runs/law/slurm/pretrain.log",
        "--open-mode": "append",
        "--signal": "B:USR1@180",
        "--requeue": "",
    }


def test_swap_head_is_one_process_for_a_short_time():
    text = stage_script("swap_head", job=JOB, paths=paths())
    asked = options(text)
    assert (asked["--nodes"], asked["--ntasks-per-node"], asked["--gpus-per-node"]) == ("1", "1", "1")
    assert asked["--time"] == "00:30:00" and "--ntasks=1" in words_of(text, "srun")


def test_a_cluster_without_gpus_is_asked_for_none():
    text = stage_script("pretrain", job=asking(gpus_per_node=0, tasks_per_node=8, cpus_per_task=4), paths=paths())
    assert "--gpus-per-node" not in options(text) and "export DS_ACCELERATOR=cpu" in text
    assert options(text)["--cpus-per-task"] == "4" and "--cpus-per-task=4" in words_of(text, "srun")
    assert "DS_ACCELERATOR" not in stage_script("pretrain", job=JOB, paths=paths())


def test_the_ranks_and_the_question_afterwards():
    text = stage_script("finetune", job=asking(max_restarts=7), paths=paths())
    srun = words_of(text, "srun")
    assert srun[-12:] == [
        *(sys.executable, "-u", "-m", "shardvit.launch.train", "/runs/law/slurm/recipe.yaml"),
        *("--stage", "finetune", "--runs", "/runs"),
        *("--own-code", "recorded", "&"),
    ]
    assert "--ntasks=32" in srun and "--nodes=4" in srun
    after = words_of(text, sys.executable)
    assert after[1:8] == [
        "-m",
        "shardvit.launch.slurm.after",
        "/runs/law",
        "--stage",
        "finetune",
        "--max-restarts",
        "7",
    ]


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_in_a_container_both_run_in_it(runtime: str):
    job = site(container={"image": "vit image", "mounts": ["/d:/d", "/e"], "runtime": runtime})
    text = stage_script("pretrain", job=job, paths=paths())
    commands = [shlex.split(line) for line in text.replace("\\\n", " ").splitlines() if line.startswith("srun")]
    assert len(commands) == 2 and "PYTHONPATH" not in text
    for words in commands:
        if runtime == "pyxis":
            assert "--container-image=vit image" in words and "--container-workdir=/w d" in words
            assert "--container-mounts=/w d:/w d,/runs:/runs,/d:/d,/e" in words
        else:
            start = words.index("apptainer")
            assert words[start : start + 9] == [
                *("apptainer", "exec", "--nv", "--bind=/w d:/w d", "--bind=/runs:/runs", "--bind=/d:/d", "--bind=/e"),
                *("--pwd=/w d", "vit image"),
            ]
        assert "python3" in words
    assert (
        "shardvit.launch.train" in commands[0]
        and "shardvit.launch.slurm.after" in commands[1]
        and "--ntasks=1" in commands[1]
    )


def test_the_sites_words_are_words(tmp_path: Path):
    job = site(
        modules=["a b", "$(touch x)"],
        python=NASTY,
        srun=["--comment=a b"],
        environment={"A": NASTY},
        sbatch={"lines": ["--comment=c d"]},
    )
    text = stage_script("pretrain", job=job, paths=paths(NASTY))
    assert options(text)["--comment"] == "c d"
    assert options(text)["--output"] == f"{NASTY}/law/slurm/pretrain.log".replace("%", "%%")
    assert words_of(text, "module") == ["module", "load", "a b", "$(touch x)"]
    assert NASTY in words_of(text, "srun") and "--comment=a b" in words_of(text, "srun")
    (tmp_path / "part").write_text("\n".join(line for line in text.splitlines() if line.startswith("export A=")))
    said = subprocess.run(
        ["bash", "-c", '. ./part; printf %s "$A"'], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert said.stdout == NASTY and not (tmp_path / "x").exists()


def test_a_folder_with_a_line_break_is_refused():
    with pytest.raises(UserError, match="line break"):
        stage_script("pretrain", job=JOB, paths=paths("/runs/a\nb"))


@pytest.mark.parametrize("stage", ["pretrain", "swap_head", "finetune", "masked_patch"])
def test_bash_understands_it(stage: StageName, tmp_path: Path):
    job = site(setup=["true"], environment={"A": "b"}, container={"image": "i"} if stage == "finetune" else None)
    script = tmp_path / "script"
    script.write_text(stage_script(stage, job=job, paths=paths("/runs/a b'c")))
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("refusals", "code"), [(0, 75), (3, 75), (1000, 1)])
def test_a_controller_that_is_busy_is_asked_again_to_requeue(refusals: int, code: int, tmp_path: Path):
    asked = tmp_path / "asked"
    stand_ins = {
        "srun": "exit 75",
        "squeue": "echo RUNNING/None",
        "sleep": "exit 0",
        "python": 'case "$*" in *shardvit.launch.slurm.after*) exit 75;; esac; exit 9',
        "scontrol": f'echo "$*" >>{asked}; [ $(wc -l <{asked}) -gt {refusals} ]',
    }
    for name, line in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    script = stage_script("pretrain", job=site(python=str(tmp_path / "python")), paths=paths())
    names = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n"}
    done = subprocess.run(["bash", "-c", script], env=names, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert asked.read_text().splitlines() == ["requeue 7"] * min(refusals + 1, 6)
    assert ("give the same shardvit submit again" in done.stderr) == (code == 1)

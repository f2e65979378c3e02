"""Pages and manifests for other places: every command in them parses with the parser of what it starts, and numbers
that belong together agree."""

import argparse
import itertools
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from shardvit.launch.cli import app
from shardvit.launch.slurm.site import read_site
from shardvit.launch.train import _parse
from shardvit.pipeline.recipe.vocabulary import EXIT_STOPPED, EXIT_USER_ERROR

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
README = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
JOBSET = yaml.safe_load((LAUNCH / "kubernetes/jobset.yaml").read_text(encoding="utf-8"))
PYTORCHJOB = yaml.safe_load((LAUNCH / "kubernetes/pytorchjob.yaml").read_text(encoding="utf-8"))
SKYPILOT = yaml.safe_load((LAUNCH / "skypilot/task.yaml").read_text(encoding="utf-8"))
DOCKERFILE = (LAUNCH / "containers/Dockerfile").read_text(encoding="utf-8")
APPTAINER = (LAUNCH / "containers/shardvit.def").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXIT_TERMINATED = 143  # 128 + SIGTERM, of shardvit.launch.local.torchrun: tests/launch/local/test_torchrun.py
STAGES = ("pretrain", "swap_head", "finetune")


def shell_lines(script: str) -> list[str]:
    """The commands of a script, without comments; what is only known where it runs is a 1."""
    joined = script.replace("\\\n", " ")
    for unknown in (r"\$\([^()]*(?:\([^()]*\)[^()]*)*\)", r"\$\{?\w+\}?", r"\$\?"):
        joined = re.sub(unknown, "1", joined)
    return [line.strip() for line in joined.splitlines() if line.strip()]


def readme_commands() -> list[str]:
    return [line for block in blocks("") for line in shell_lines(block)]


def blocks(language: str) -> list[str]:
    """The page's blocks of code in a language; "": commands."""
    return [text for name, text in re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S) if name == language]


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for job in JOBSET["spec"]["replicatedJobs"]:
        yield job["name"], job["template"]["spec"]["template"]["spec"]
    for kind, replicas in PYTORCHJOB["spec"]["pytorchReplicaSpecs"].items():
        yield kind, replicas["template"]["spec"]


def pod_commands() -> list[str]:
    return [shell_lines(shlex.join(pod["containers"][0]["command"]).replace("'", ""))[0] for _, pod in pods()]


def launched(command: str) -> argparse.Namespace | None:
    """What `launch.train` makes of its part of a command, after the launcher's own parser has had the rest."""
    words = shlex.split(command, comments=True)
    if "shardvit.launch.local.torchrun" in words:
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(words[words.index("shardvit.launch.local.torchrun") + 1 :])
        assert options.module and options.training_script == "shardvit.launch.train"
        return _parse(options.training_script_args)
    if words[:2] == ["accelerate", "launch"]:
        from accelerate.commands.launch import launch_command_parser

        options = launch_command_parser().parse_args(words[2:])
        assert options.module and options.training_script == "shardvit.launch.train"
        return _parse(options.training_script_args)
    if words[0] == "deepspeed":
        from deepspeed.launcher.runner import parse_args

        options = parse_args(words[1:])
        assert options.module and options.no_local_rank and options.user_script == "shardvit.launch.train"
        return _parse(options.user_args)
    if "shardvit.launch.train" in words:
        return _parse(words[words.index("shardvit.launch.train") + 1 :])
    return None


COMMANDS = [
    *readme_commands(),
    *pod_commands(),
    *(
        line.replace("|| exit 1", "")
        for stage in STAGES
        for line in shell_lines(SKYPILOT["run"].replace("$stage", stage))
        if "-m launch" in line
    ),
]


@pytest.mark.parametrize("command", [command for command in COMMANDS if "shardvit.launch.train" in command])
def test_what_starts_training_parses(command: str):
    options = launched(command)
    assert options is not None and set(options.stages) <= set(STAGES)


# The other programs whose commands the page shows; what they do with them is their own manuals' to say.
FOREIGN = ("docker build", "apptainer build", "enroot import", "kubectl", "sky jobs", "export MASTER_ADDR")


@pytest.mark.parametrize(
    "command", [command for command in readme_commands() if "shardvit.launch.train" not in command]
)
def test_the_other_commands_are_shardvits_own_or_known_foreign_ones(command: str):
    words = shlex.split(command, comments=True)
    if command.startswith("apptainer run"):  # the image's runscript puts the name before it
        assert 'exec shardvit "$@"' in APPTAINER
        words = ["shardvit", *words[words.index("shardvit.sif") + 1 :]]
    if "shardvit" in words and not command.startswith(FOREIGN):
        last = len(words) - 1 - words[::-1].index("shardvit")
        app.parse_args(words[last + 1 :], exit_on_error=False, print_error=False)
    elif command.startswith("python -m shardvit.launch.bench."):
        assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file(), command
    else:
        assert command.startswith((*FOREIGN, "sed ")), command


def test_the_page_shows_every_launcher_and_every_file():
    shown = "\n".join(readme_commands())
    for words in (
        "deepspeed --",
        "shardvit.launch.local.torchrun",
        "accelerate launch",
        "srun --",
        "--hostfile",
        "--container-image=",
    ):
        assert words in shown, words
    files = [path for folder in ("containers", "kubernetes", "skypilot") for path in (LAUNCH / folder).iterdir()]
    assert len(files) == 6
    for path in files:
        assert path.name in README or path.name.endswith(".dockerignore"), path
    for path in re.findall(r"launch/(?:containers|kubernetes|skypilot)/[\w.]+|(?<=\]\()[\w/]+\.yaml", README):
        assert (ROOT / path).exists() or (LAUNCH / path).exists(), path


def test_pyxis_options_are_those_of_its_manual():
    options = {name for command in readme_commands() for name in re.findall(r"--container-[a-z]+", command)}
    assert options == {"--container-image", "--container-mounts", "--container-workdir"}


def test_the_images_have_a_python_that_pyproject_allows():
    [docker] = re.findall(r"^ARG PYTHON=(.+)$", DOCKERFILE, re.M)
    [apptainer] = re.findall(r"^From: python:(.+)-slim$", APPTAINER, re.M)
    assert docker == apptainer and SpecifierSet(PROJECT["requires-python"]).contains(f"{docker}.0")
    assert f"Programming Language :: Python :: {docker}" in PROJECT["classifiers"]
    assert "FROM python:${PYTHON}-slim" in DOCKERFILE


@pytest.mark.parametrize("content", [DOCKERFILE, APPTAINER], ids=["Docker", "Apptainer"])
def test_the_images_install_with_the_constraints_and_repeat_no_version(content: str):
    installs = re.findall(r"pip install (.+)$", content, re.M)
    assert installs and all("--constraint constraints.txt" in line and "--editable ." in line for line in installs)
    assert not re.search(r"==|>=|~=|\bcu1\d\d\b", content)
    rooms = (
        ("data_shards", "launch", "model", "pipeline", "shardvit") if content == DOCKERFILE else ()
    )  # links stay links
    for package in (*rooms, "src", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        assert re.search(rf"^(?:COPY|    )\s*[\w .]*{re.escape(package)}", content, re.M), package


def test_docker_is_sent_what_its_file_copies_and_nothing_else():
    rules = (LAUNCH / "containers/Dockerfile.dockerignore").read_text(encoding="utf-8").split("\n")
    kept = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    copied = {word for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.M) for word in line.split()}
    assert "*" in rules and kept == copied
    assert all((ROOT / name).exists() for name in kept)


def test_apptainers_sections_are_known():
    known = {"files", "post", "environment", "runscript", "test"}
    assert set(re.findall(r"^%(\w+)$", APPTAINER, re.M)) == known
    assert APPTAINER.partition("Bootstrap")[0].replace("#", "").strip()  # comments alone come before the header


def flags(pod: dict[str, Any]) -> dict[str, str]:
    return dict(word[2:].split("=") for word in pod["containers"][0]["command"] if word.startswith("--"))


def test_the_jobset_has_the_stages_in_order_each_after_the_one_before():
    jobs = JOBSET["spec"]["replicatedJobs"]
    assert JOBSET["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and JOBSET["kind"] == "JobSet"
    assert tuple(flags(pod)["stage"] for _, pod in list(pods())[:3]) == STAGES
    assert "dependsOn" not in jobs[0]
    for before, job in itertools.pairwise(jobs):
        assert job["dependsOn"] == [{"name": before["name"], "status": "Complete"}]


def test_the_jobsets_numbers_agree():
    for job in JOBSET["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        pod = spec["template"]["spec"]
        container, given = pod["containers"][0], flags(pod)
        assert spec["completions"] == spec["parallelism"] == int(given.get("nnodes", 1))
        assert spec["completionMode"] == "Indexed" and spec["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
        if "nnodes" in given:
            # <set>-<job>-<number of the job>-<number of the pod>.<set>: JobSet's name for the first pod
            name = JOBSET["metadata"]["name"]
            assert given["master-addr"] == f"{name}-{job['name']}-0-0.{name}"
            assert container["ports"] == [{"containerPort": int(given["master-port"])}]
            assert container["resources"]["limits"]["nvidia.com/gpu"] == int(given["nproc-per-node"])
            assert container["env"][0]["name"] == "NODE_RANK" and given["node-rank"] == "$(NODE_RANK)"


def test_the_jobset_tells_the_exit_codes_apart():
    for job in JOBSET["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        evicted, codes = spec["podFailurePolicy"]["rules"]
        assert evicted == {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget"}]}
        assert codes["action"] == "FailJob"
        assert codes["onExitCodes"]["values"] == [EXIT_USER_ERROR, EXIT_STOPPED, EXIT_TERMINATED]
        assert codes["onExitCodes"]["containerName"] == spec["template"]["spec"]["containers"][0]["name"]
    mistake, stopped = JOBSET["spec"]["failurePolicy"]["rules"]
    [pattern] = mistake["onJobFailureMessagePatterns"]

    def message(code: int) -> str:  # Kubernetes' sentence (pkg/controller/job/pod_failure_policy.go)
        return f"Container trainer for pod default/x failed with exit code {code} matching FailJob rule at index 1"

    assert re.fullmatch(pattern, message(EXIT_USER_ERROR))
    for other in (EXIT_STOPPED, EXIT_TERMINATED, 20, 22, 12):
        assert not re.fullmatch(pattern, message(other))
    assert mistake["action"] == "FailJobSet"
    assert stopped["action"] == "RestartJobSetAndIgnoreMaxRestarts" and "onJobFailureMessagePatterns" not in stopped
    assert mistake["onJobFailureReasons"] == stopped["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert JOBSET["spec"]["failurePolicy"]["maxRestarts"] > 0


def test_the_pytorchjob_is_as_its_operator_wants_it():
    spec = PYTORCHJOB["spec"]
    assert PYTORCHJOB["apiVersion"] == "kubeflow.org/v1" and PYTORCHJOB["kind"] == "PyTorchJob"
    replicas = spec["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    machines = replicas["Master"]["replicas"] + replicas["Worker"]["replicas"]
    assert spec["runPolicy"]["backoffLimit"] % machines == 0
    for kind in replicas.values():
        assert kind["restartPolicy"] == "OnFailure"
        container = kind["template"]["spec"]["containers"][0]
        assert container["name"] == "pytorch"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(spec["nprocPerNode"])


@pytest.mark.parametrize(("stage", "name"), [("swap_head", "shardvit-swap-head"), ("finetune", "shardvit-finetune")])
def test_the_pages_sed_makes_the_next_stages_pytorchjob(stage: str, name: str):
    [line] = [line for line in README.splitlines() if line.startswith("sed ") and f"/{stage}/" in line]
    command = shlex.split(line)
    made = subprocess.run(command[: command.index("|")], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    job = yaml.safe_load(made)
    assert job["metadata"]["name"] == name and re.fullmatch(r"[a-z0-9-]+", name)
    for replicas in job["spec"]["pytorchReplicaSpecs"].values():
        assert replicas["template"]["spec"]["containers"][0]["command"][-1] == f"--stage={stage}"


def test_pods_have_time_to_save_and_shared_memory():
    for name, pod in pods():
        container = pod["containers"][0]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert container["workingDir"] in mounts and "persistentVolumeClaim" in volumes[mounts["/data"]]
        if "shardvit.launch.local.torchrun" in container["command"]:
            environment = {each["name"]: each.get("value") for each in container["env"]}
            saving = int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] or 0)
            assert 30 < saving < pod["terminationGracePeriodSeconds"], name
    assert len({pod["containers"][0]["image"] for _, pod in pods()}) == 1


def test_torchrun_knows_the_variable_that_leaves_time_to_save(monkeypatch: pytest.MonkeyPatch):
    from torch.distributed.launcher.api import LaunchConfig

    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1)
    if not hasattr(config, "shutdown_timeout"):
        pytest.skip("before torch 2.12 torchrun always waits 30 seconds")
    assert config.shutdown_timeout == 120


def test_the_skypilot_task():
    recovery = SKYPILOT["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [EXIT_STOPPED, EXIT_TERMINATED]
    assert recovery["max_restarts_on_errors"] == 3 and "at most 3 times" in README
    assert f"for stage in {' '.join(STAGES)}; do" in SKYPILOT["run"]
    for name in re.findall(r"\$(SKYPILOT_\w+)", SKYPILOT["run"]):
        assert name in {
            *("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE"),
        }
    assert SKYPILOT["setup"].split()[:2] == ["bash", ".ci/install"] and (ROOT / ".ci/install").exists()
    assert set(SKYPILOT["volumes"]) == {"/data"} and "cd /data" in SKYPILOT["run"]
    assert set(SKYPILOT["envs"]) == {"RECIPE"}


@pytest.mark.parametrize("code", [0, EXIT_STOPPED])
def test_the_skypilot_tasks_script_runs_the_stages_and_ends_with_their_code(tmp_path: Path, code: int):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    stand_in = tmp_path / ".venv/bin/python"
    stand_in.write_text(f'#!/bin/sh\necho "$PWD: $*"\nexit {code}\n', encoding="utf-8")
    stand_in.chmod(0o755)
    script = SKYPILOT["run"].replace("/data", str(tmp_path / "data"))
    environment = {
        **{"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"},
        **{"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "RECIPE": "my.yaml", "PATH": "/usr/bin:/bin"},
    }
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    assert done.returncode == code and len(lines) == (1 if code else 3), done.stderr
    for stage, line in zip(STAGES, lines, strict=False):
        assert line == (
            f"{tmp_path}/data: -P -m shardvit.launch.local.torchrun --nnodes 2 --node-rank 1 --nproc-per-node 8 "
            f"--master-addr 10.0.0.1 --master-port 29500 -m shardvit.launch.train my.yaml --stage {stage}"
        )


def test_the_readmes_table_of_exit_codes_names_those_of_the_manifests():
    assert f"| {EXIT_STOPPED} or {EXIT_TERMINATED}: stopped | {EXIT_USER_ERROR}: a mistake |" in re.sub(
        " +", " ", README
    )


def test_the_site_file_that_is_shown_is_one(tmp_path: Path):
    (text,) = blocks("toml")
    (tmp_path / "site.toml").write_text(text, encoding="utf-8")
    site = read_site(tmp_path / "site.toml")
    assert site.sbatch.partition == "gpu" and site.container is not None and site.modules and site.environment

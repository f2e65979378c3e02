"""Whatever starts the ranks, the losses are the same, and nothing in the working folder is imported: plain python,
deepspeed, torchrun, ours, accelerate launch, srun (a stand-in; tests/cluster has the real one, and several hosts)."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from shardvit.data_shards.packing.pack import pack
from shardvit.launch.local.env import without_place
from tests.faults.harness import MARK, ROOT, Case
from tests.faults.rows import Row
from tests.traps import MODULES, PACKAGES, ROOMS, Watch, lay_traps

WAIT_SECONDS = 240.0


def free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        return door.getsockname()[1]


def python(module: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", module, *map(str, arguments)]


def deepspeed(processes: int, *arguments: str) -> list[str]:
    return python("deepspeed.launcher.runner", "--num_gpus", processes, "--master_port", free_port(), *arguments)


def torchrun(module: str, processes: int) -> list[str]:
    port = free_port()
    return python(module, "--nproc-per-node", processes, "--master-port", port, "-m", "shardvit.launch.train")


def accelerate(processes: int) -> list[str]:
    # Without GPUs `--cpu` is one process whatever is asked for; `--multi_gpu` starts as many as it is told.
    return python(
        "accelerate.commands.launch",
        *("--multi_gpu" if processes > 1 else "--cpu", "--num_processes", processes, "--num_machines", 1),
        *("--main_process_port", free_port(), "--mixed_precision", "no", "--dynamo_backend", "no"),
        *("--module", "shardvit.launch.train"),
    )


SCRIPT = str(ROOT / "launch" / "train.py")
QUICK = "shardvit.launch.local.torchrun"
LAUNCHERS: dict[str, Callable[[int], list[str]]] = {
    "deepspeed, module": lambda n: deepspeed(n, "--module", "shardvit.launch.train"),  # --local_rank comes first
    "deepspeed, script": lambda n: deepspeed(n, SCRIPT),
    "deepspeed, without --local_rank": lambda n: deepspeed(n, "--no_local_rank", "--module", "shardvit.launch.train"),
    "torchrun": lambda n: torchrun("torch.distributed.run", n),
    "shardvit.launch.local.torchrun": lambda n: torchrun("shardvit.launch.local.torchrun", n),
    "accelerate launch": accelerate,
    "srun": lambda n: [
        sys.executable,
        "-P",
        "-m",
        "tests.faults.srun",
        str(n),
    ],  # -P: srun itself imports nothing of ours
}
Typed = Literal["safe path", "plainly"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "digits"
    pack("digits", out, classes=("0", "1", "2"), holdout=0.2, samples_per_shard=100, report=lambda text: None)
    return out


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Callable[[int], Case]:
    """`reference(processes)`: the run that `shardvit run` does; each once."""
    done: dict[int, Case] = {}

    def make(processes: int) -> Case:
        if processes not in done:
            case = Case(tmp_path_factory.mktemp("reference") / "case", shards, changes={"processes": processes})
            ended = case.start(how="run").wait()
            assert ended.code == 0, ended.output
            done[processes] = case
        return done[processes]

    return make


def train(case: Case, command: list[str], *, typed: Typed) -> None:
    """Run `command` on the case's stage, to its end, where modules have the names of our rooms, or those of torch and
    others too if it is typed with PYTHONSAFEPATH (without, the launchers themselves import torch from there)."""
    sprung = lay_traps(case.folder, names=(*MODULES, *PACKAGES) if typed == "safe path" else ROOMS)
    watch = Watch(case.folder.parent / "watch")
    done = subprocess.run(
        [*command, "recipe.yaml", "--stage", "pretrain"],
        cwd=case.folder,
        env={
            **without_place(),
            "PYTHONPATH": os.pathsep.join([str(watch.folder), str(ROOT)]),
            **{"TMPDIR": str(case.temporary), MARK: case.mark, "DS_ACCELERATOR": "cpu"},
            **({"PYTHONSAFEPATH": "1"} if typed == "safe path" else {}),
            "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",  # nobody there
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert case.record()["state"] == "done", done.stdout
    assert sprung() == []
    watch.demand("shardvit.launch.train" if SCRIPT not in command else SCRIPT, without=case.folder)


@pytest.mark.parametrize(
    "launcher", [each if each == QUICK else pytest.param(each, marks=pytest.mark.slow) for each in LAUNCHERS]
)
def test_two_processes(launcher: str, tmp_path: Path, shards: Path, reference: Callable[[int], Case]):
    case = Case(tmp_path / "case", shards)
    train(case, LAUNCHERS[launcher](2), typed="plainly")
    Row(name=launcher).equals(case, reference(2))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["python", *LAUNCHERS])
def test_one_process(launcher: str, tmp_path: Path, shards: Path, reference: Callable[[int], Case]):
    case = Case(tmp_path / "case", shards, changes={"processes": 1})
    command = python("shardvit.launch.train") if launcher == "python" else LAUNCHERS[launcher](1)
    train(case, command, typed="safe path")
    Row(name=launcher).equals(case, reference(1))

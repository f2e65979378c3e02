"""One task for a whole node: a process for each GPU, told apart, signalled, and waited for."""

import os
import signal
import subprocess
import time
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from shardvit.launch import train
from shardvit.launch.local import env, processes
from shardvit.launch.local.env import NodeShare, node_share, read_place
from shardvit.launch.local.start import run_node
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.recipe.vocabulary import EXIT_STOPPED

SHARE = NodeShare(node=1, nodes=2, processes=2, address="n1", port=20_001)
STEP = {
    **{"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"},
    **{"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]"},
}
ONE_NODE = {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"}


def test_a_task_that_sees_several_gpus_has_the_whole_node():
    assert node_share(STEP, processes="auto", gpus=8) == NodeShare(1, 2, processes=8, address="n1", port=20_144)
    assert node_share({**STEP, "MASTER_ADDR": "a", "MASTER_PORT": "7"}, processes=16, gpus=8) == NodeShare(
        1, 2, processes=8, address="a", port=7
    )
    assert node_share(ONE_NODE, processes="auto", gpus=4) == NodeShare(0, 1, processes=4, address="n1", port=20_144)


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_task_that_sees_one_gpu_is_a_process(gpus: int):
    assert node_share(STEP, processes="auto", gpus=gpus) is None


def test_as_many_tasks_as_the_recipe_has_processes_are_the_processes():
    assert node_share(STEP, processes=2, gpus=8) is None
    assert node_share(ONE_NODE, processes=1, gpus=8) is None


def test_several_tasks_on_a_node_are_processes():
    assert node_share({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2"}, processes="auto", gpus=2) is None


def test_outside_of_a_step_and_under_another_launcher_there_is_no_share():
    assert node_share({}, processes="auto", gpus=8) is None
    assert node_share({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "9"}, processes="auto", gpus=8) is None
    names = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert node_share({**STEP, **names, "LOCAL_WORLD_SIZE": "8"}, processes="auto", gpus=8) is None
    assert node_share({**ONE_NODE, **names}, processes="auto", gpus=8) is None


def told(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    for name, value in {**STEP, **changes}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("task", "times"), [("0", 1), ("1", 0)])
def test_one_task_says_what_all_find_wrong(
    task: str, times: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    told(monkeypatch, SLURM_PROCID=task, WORLD_SIZE="16")
    assert train.main(["digits", "--stage", "pretrain"]) == 2
    assert capsys.readouterr().err.count("WORLD_SIZE is 16, but srun started 2 tasks") == times


def test_the_entry_point_becomes_the_launcher_of_its_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    told(monkeypatch)
    started: list[tuple[NodeShare, list[str]]] = []

    def run(share: NodeShare, arguments: list[str]) -> int:
        started.append((share, arguments))
        return 75

    monkeypatch.setattr(env, "num_gpus", lambda environ: 4)
    monkeypatch.setattr(train, "run_node", run)
    given = ["digits", "processes=auto", "--stage", "pretrain", "--runs", str(tmp_path)]
    assert train.main(given) == 75
    share = NodeShare(1, 2, processes=4, address="n1", port=20_144)
    assert started == [(share, ["-u", "-m", "shardvit.launch.train", *given])]


def test_its_processes_know_their_place():
    place = read_place({**STEP, **SHARE.environ_of(1)}, gpus=2)
    met = Place(3, 4, local_rank=1, local_world_size=2, master_addr="n1", master_port=20_001, log="of the run")
    assert place == met


def test_the_code_that_tells_most_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = (
        "import os, sys, time\n"
        "open('seen-' + os.environ['RANK'] + os.environ.get('SLURM_PROCID', ''), 'w').close()\n"
        "while len(os.listdir()) < 2: time.sleep(0.02)\n"  # the first to fail ends the other
        "sys.exit(int(os.environ['LOCAL_RANK']) * 7)"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert run_node(SHARE, ["-c", program]) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seen-2", "seen-3"]
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL if os.environ['RANK'] == '2' else 0)"
    assert run_node(SHARE, ["-c", killed]) == 128 + signal.SIGKILL


def test_one_that_does_not_end_after_another_is_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "_FOLLOW_SECONDS", 0.3)
    program = "import os, time; time.sleep(0 if os.environ['RANK'] == '2' else 600)"
    begun = time.monotonic()
    assert run_node(SHARE, ["-c", program]) == 128 + signal.SIGKILL
    assert time.monotonic() - begun < 240


def test_a_signal_while_they_are_being_started_reaches_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rank = (
        "import os, signal, sys, time; "
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); "
        "open('ready-' + os.environ['RANK'], 'w').close(); time.sleep(600)"
    )
    monkeypatch.chdir(tmp_path)
    started, real = [], subprocess.Popen

    def start(*arguments: Any, **more: Any) -> subprocess.Popen[bytes]:
        started.append(real(*arguments, **more))
        while len(list(tmp_path.glob("ready-*"))) < len(started):
            time.sleep(0.02)
        if len(started) == 1:
            signal.raise_signal(signal.SIGUSR1)
        return started[-1]

    monkeypatch.setattr(
        "shardvit.launch.local.processes.subprocess", SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    )
    assert run_node(SHARE, ["-c", rank]) == 75


def test_a_stop_before_a_rank_listens_is_a_stop_and_no_death(tmp_path: Path) -> None:
    here = tmp_path / "here"

    def stop() -> None:
        while not here.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=stop, daemon=True).start()
    program = f"import time; open({str(here)!r}, 'w').close(); time.sleep(600)"
    assert run_node(SHARE, ["-c", program]) == EXIT_STOPPED

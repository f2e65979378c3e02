"""What each rank is told, and what becomes of the ranks when somebody presses Ctrl-C or one of them ends badly."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from shardvit.launch.local.env import read_place
from shardvit.launch.local.processes import rank_environment
from shardvit.launch.local.start import Launch, rank_arguments
from shardvit.launch.train import _parse
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.vocabulary import StageName
from tests.stand_in import stand_in_for_launch

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_SECONDS = 240.0


def launch(stage: StageName = "pretrain") -> Launch:
    return Launch(
        recipe=load_recipe("digits"),
        recipe_file=Path("some runs/digits/recipe.yaml"),
        runs_root=Path("some runs"),
        stage=stage,
        processes=3,
    )


@pytest.mark.parametrize("stage", ["pretrain", "swap_head", "finetune"])
def test_a_rank_is_told_everything(stage: StageName):
    options = _parse(rank_arguments(launch(stage)))
    assert options.recipe == "some runs/digits/recipe.yaml" and options.overrides == []
    assert options.stages == [stage] and options.runs == Path("some runs")


def test_several_stages_are_told_in_order_and_the_head_is_swapped_by_the_ranks_that_are_there():
    together = replace(launch(), then=("swap_head", "finetune"))
    assert _parse(rank_arguments(together)).stages == ["pretrain", "swap_head", "finetune"]
    assert together.ranks == replace(launch("swap_head"), then=("finetune",)).ranks == 3


@pytest.mark.parametrize(("stage", "ranks"), [("pretrain", 3), ("swap_head", 1), ("finetune", 3)])
def test_every_rank_has_a_place_of_its_own_and_nobody_a_port(stage: StageName, ranks: int):
    stage_launch = launch(stage)
    assert stage_launch.ranks == ranks
    environments = [rank_environment(rank, ranks=stage_launch.ranks, rendezvous=Path("/meet")) for rank in range(ranks)]
    places = [read_place(environment, gpus=0) for environment in environments]
    assert [place.rank for place in places] == [place.local_rank for place in places] == list(range(ranks))
    assert {(place.world_size, place.local_world_size) for place in places} == {(ranks, ranks)}
    assert {place.rendezvous for place in places} == ({Path("/meet")} if ranks > 1 else {None})
    assert not any("MASTER_PORT" in environment for environment in environments)


@pytest.mark.parametrize("spelling", ["--local_rank=1", "--local-rank=1"])
def test_a_launchers_own_argument_is_passed_over(spelling: str):
    options = _parse([spelling, "a.yaml", "seed=1", "--stage", "finetune", "seed=2"])
    assert options.recipe == "a.yaml" and options.overrides == ["seed=1", "seed=2"] and options.stages == ["finetune"]


# A stand-in, called like ours (python -u -m shardvit.launch.train).
RANK = """
import json, os, signal, sys, time
from pathlib import Path
kind, number = sys.argv[1], os.environ["RANK"]
NAMES = ("SHARDVIT_SUPERVISOR_PID", "SHARDVIT_RENDEZVOUS", "DS_ACCELERATOR")
def stop(*_):
    Path(f"stopped-{number}").touch()
    if kind == "graceful":
        sys.exit(75)
signal.signal(signal.SIGTERM, stop)
seen = {name: os.environ.get(name) for name in NAMES}
Path(f"rank-{number}.tmp").write_text(json.dumps({"pid": os.getpid(), **seen}))
os.rename(f"rank-{number}.tmp", f"rank-{number}.json")
while True:
    time.sleep(0.05)
"""
DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from shardvit.launch.local import processes, start
from shardvit.pipeline.recipe.io import load_recipe
start.rank_arguments = lambda launch: sys.argv[2:]
processes._FOLLOW_FAILED_SECONDS = 1.0
stage = start.Launch(load_recipe("digits"), Path("recipe.yaml"), Path("runs"), stage="pretrain", processes=2)
(stage.runs_root / "digits").mkdir(parents=True, exist_ok=True)  # its lock is held by now
try:
    print("code", start.run_stage_locally(stage), flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


ON_ITS_WAY_OUT = """
def stop(*_):
    signal.signal(15, signal.SIG_DFL)  # as Python does at its end
    if os.environ["RANK"] == "1":
        time.sleep(600)
    sys.exit(1)
signal.signal(15, stop)
"""


@dataclass
class Standing:
    """`run_stage_locally` in a process of its own, with two ranks below it."""

    driver: subprocess.Popen[str]
    ranks: list[dict[str, str | int]]
    folder: Path

    def finish(self) -> str:
        """What the driver printed; every rank is dead by then."""
        output, _ = self.driver.communicate(timeout=PATIENCE_SECONDS)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while alive := [rank["pid"] for rank in self.ranks if is_alive(int(rank["pid"]))]:
            assert time.monotonic() < deadline, f"ranks {alive} are still there"
            time.sleep(0.02)
        return output


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def standing(tmp_path: Path, kind: str) -> Iterator[Standing]:
    stand_in_for_launch(tmp_path, train=RANK)
    command = [sys.executable, "-c", DRIVER, str(ROOT), kind]
    # the ranks find the stand-in; the driver itself needs the real package and puts that before it
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(tmp_path)}
    driver = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a terminal's Ctrl-C reaches the driver, not these tests
    )
    files = [tmp_path / f"rank-{number}.json" for number in range(2)]
    ranks: list[dict[str, str | int]] = []
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all(file.exists() for file in files):
            assert driver.poll() is None and time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.02)
        ranks += [json.loads(file.read_text()) for file in files]
        yield Standing(driver, ranks, tmp_path)
    finally:
        for pid in [int(rank["pid"]) for rank in ranks]:  # first: they hold the driver's output open
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        driver.kill()
        driver.communicate(timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_know_their_supervisor_share_a_private_folder_and_stop_at_one_ctrl_c(
    tmp_path: Path, number: signal.Signals
):
    left = tmp_path / "runs" / "digits" / ".rendezvous-of-a-killed-attempt"
    left.mkdir(parents=True)
    (left / "address").write_text("127.0.0.1 1")
    with standing(tmp_path, "graceful") as run:
        assert {rank["SHARDVIT_SUPERVISOR_PID"] for rank in run.ranks} == {str(run.driver.pid)}
        assert {rank["DS_ACCELERATOR"] for rank in run.ranks} == {"cpu"}  # there is no GPU
        (folder,) = {Path(str(rank["SHARDVIT_RENDEZVOUS"])) for rank in run.ranks}
        assert folder.is_absolute() and folder.parent == left.parent and not left.exists()
        assert folder.stat().st_mode & 0o777 == 0o700
        os.killpg(run.driver.pid, number)  # as a terminal does: the whole foreground group
        output = run.finish()
        assert not folder.exists()
        assert "stopping: the ranks finish their step and save" in output
        assert output.endswith("code 75\n") and "Traceback" not in output
        assert all((tmp_path / f"stopped-{rank}").exists() for rank in range(2))


def test_a_second_ctrl_c_kills_ranks_that_do_not_stop(tmp_path: Path):
    with standing(tmp_path, "stubborn") as run:
        run.driver.send_signal(signal.SIGINT)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all((tmp_path / f"stopped-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.2)
        assert run.driver.poll() is None and all(is_alive(int(rank["pid"])) for rank in run.ranks)
        run.driver.send_signal(signal.SIGINT)
        output = run.finish()
        assert output.endswith("interrupted\n") and "Traceback" not in output


def test_a_rank_that_was_killed_ends_the_others_and_says_why(tmp_path: Path):
    with standing(tmp_path, "stubborn") as run:
        os.kill(int(run.ranks[1]["pid"]), signal.SIGKILL)
        assert f"code {-signal.SIGKILL}" in run.finish()
        assert (tmp_path / "stopped-0").exists()  # it was asked first


@pytest.mark.parametrize(
    ("listens", "ended"),
    [
        ("", "interrupted"),  # it is still importing, and dies of SIGTERM
        ("signal.signal(15, lambda *_: sys.exit(0))", "interrupted"),
        ("signal.signal(15, lambda *_: sys.exit(75))", "code 75"),
        ("signal.signal(15, lambda *_: sys.exit(1))", "code 1"),
        (ON_ITS_WAY_OUT, "code 1"),  # a second SIGTERM would kill rank 1
        ("os.environ['RANK'] == '1' or signal.signal(15, signal.SIG_IGN)", "interrupted"),  # and must be killed
    ],
    ids=["not listening yet", "came to its end", "saved", "failed", "one is on its way out", "one hangs"],
)
def test_what_a_rank_makes_of_a_stop(tmp_path: Path, listens: str, ended: str):
    stand_in_for_launch(
        tmp_path,
        train=f"import os, signal, sys, time\n{listens}\n"
        "open('here-' + os.environ['RANK'], 'w').close()\ntime.sleep(600)",
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(ROOT)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with driver:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all((tmp_path / f"here-{rank}").exists() for rank in range(2)):
            assert driver.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        driver.send_signal(signal.SIGINT)
        assert driver.communicate(timeout=PATIENCE_SECONDS)[0] == f"{ended}\n"


PLAIN_DRIVER = """
import sys
sys.path.insert(0, sys.argv[1])
from shardvit.launch.local import start
from pathlib import Path
from shardvit.pipeline.recipe.io import load_recipe
show = "from shardvit.launch.local.env import read_place; "
show += "place = read_place(); print('place', place.rank, place.world_size)"
start.RANK_COMMAND, start.rank_arguments = ["-c", show], lambda launch: []
root = Path(sys.argv[2])
stage = start.Launch(load_recipe("digits"), Path("recipe.yaml"), root, stage="swap_head", processes=2)
(root / "digits").mkdir(parents=True, exist_ok=True)
print("code", start.run_stage_locally(stage), flush=True)
"""


def test_a_launcher_around_shardvit_run_is_not_taken_for_ours(tmp_path: Path):
    """swap_head is started as one plain process: what a job has set around us would make it wait for others."""
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    batch_script = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    around = {**torchrun, **batch_script, "SHARDVIT_RENDEZVOUS": "/nowhere"}
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_DRIVER, str(ROOT), str(tmp_path / "runs")],
        cwd=ROOT,
        env={**os.environ, **around},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "place 0 1\n" in done.stdout and "code 0" in done.stdout, done.stderr
    assert list((tmp_path / "runs" / "digits").iterdir()) == []

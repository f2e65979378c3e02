"""Nothing in the working folder is imported, whatever it is called, by any command or anything that one starts; and
what stands there is the user's own when he imports it himself. Launchers: test_launchers.py and tests/cluster."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardvit.data_shards.store.commands import pipe_pieces
from shardvit.data_shards.working_folder import SAFE_PATH, users_environment
from shardvit.launch.cli import COMMANDS
from tests.conftest import ROOT
from tests.traps import Watch, lay_traps

RECIPE = """
name: small
processes: 2
model: {width: 32, depth: 1, heads: 2, patch_size: 4}
data: {workers: 2, worker_kind: process}
engine: {precision: fp32}
stages:
  pretrain:
    train: shards/train
    eval: shards/val
    image_size: 16
    global_batch_size: 16
    duration: 2 steps
    optimizer: {name: adamw, lr: 0.001}
"""
FIRST = (  # in an order in which they can run
    "pack digits shards --holdout 0.2",
    "check shards --decode",
    "run my.yaml",
    "eval runs/small shards/val --processes 2",
    "report runs/small",
)
LOOKING = (
    "show shards/train --output show.html",
    "plan my.yaml --gpus 2 --gpu h200",
    "run my.yaml --dry-run",
    "predict runs/small show.png",
    "transfer runs/small shards/train shards/val --method knn",
    "transfer runs/small shards/train shards/val --method fewshot --shots 5",
    "figures runs/small show.png",
    "watch runs/small --once",
    "status runs/small",
    "export runs/small --format npz --output weights.npz",
    "export runs/small --format onnx",
    "import weights.npz imported --width 32 --depth 1 --heads 2 --patch-size 4",
    "sync runs/small",
)
STARTING = (
    "recipes digits",
    "train my.yaml --stage pretrain",
    "sweep my.yaml pretrain.optimizer.lr=0.001,0.002 --hold-out 20%",
    "submit my.yaml --nodes 1 --tasks-per-node 2 --time 0:10:00 --render",
    "cancel runs/small",
    "compare runs/small runs/small-sweep/final --output both.html",
    *("push runs/small owner/name" for commands in COMMANDS.values() if "push" in commands),
    "doctor",
)
DEMO = "demo --shards demo-shards"
MAY_END_OTHERWISE = ("doctor", "cancel", "push")  # machines differ, and there is no SLURM and no hub
NO_HUB = {"HF_ENDPOINT": "http://127.0.0.1:9"}
STARTED = ("shardvit.launch.train", "forkserver")  # what `run` starts


def python(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SHARDVIT_PICTURES": "auto", **NO_HUB, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )


def run_all(folder: Path, commands: Sequence[str], *, started: Sequence[str] = STARTED) -> None:
    """Each ends in order, and none springs a trap, or has the folder in its sys.path."""
    sprung, watch = lay_traps(folder), Watch(folder.parent / "watch")
    paths = os.pathsep.join([str(watch.folder), str(ROOT / "src")])
    (folder / "my.yaml").write_text(RECIPE)
    for command in commands:
        if command in LOOKING and not (folder / "show.png").exists():
            (folder / "show.png").write_bytes(next((folder / "runs").rglob("pictures/**/*.png")).read_bytes())
        done = python(
            folder, "-P", "-m", "shardvit.launch.cli", *command.split(), PYTHONPATH=paths
        )  # -P: as the script
        said = f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == 0 or command.startswith(MAY_END_OTHERWISE), said
        assert (sprung(), "Traceback" in said) == ([], False), said
    watch.demand(*started, without=folder)


def test_commands_and_all_that_they_start_run_in_a_repository_of_the_same_names(tmp_path: Path):
    run_all(tmp_path / "repository", FIRST)
    assert list(tmp_path.rglob("pictures/**/*.png")), "nothing was drawn"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("more", [LOOKING, STARTING], ids=["looking", "starting"])
def test_every_command_does(more: Sequence[str], tmp_path: Path):
    run_all(tmp_path / "repository", (*FIRST, *more))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_does(tmp_path: Path):
    run_all(tmp_path / "repository", (DEMO,), started=("shardvit.launch.local.nursery",))  # its ranks are forks


def test_no_command_is_forgotten():
    tried = {command.split()[0] for command in (*FIRST, *LOOKING, *STARTING, DEMO)}
    assert sorted({name for commands in COMMANDS.values() for name in commands} - tried) == []


OWN = """
import sys
before = list(sys.path)
import shardvit
import data_shards, launch.steps, model
import pipeline.steps  # a folder without __init__.py
from shardvit.data_shards.reading.opening import open_shards
shardvit.UserError  # is imported on demand
own = [module.OWN for module in (data_shards, launch.steps, model, pipeline.steps)]
if __name__ == "__main__":
    if sys.argv[1:] == ["run"]:
        shardvit.run("my.yaml")
    assert sys.path == before, (sys.path, before)
    print("own:", *own)
"""


def lay_own(folder: Path) -> None:
    """A repository whose modules have the names of our rooms, and a script and a package that import us too."""
    for name in ("data_shards.py", "model.py", "launch/__init__.py", "launch/steps.py", "pipeline/steps.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"OWN = {name!r}\n" if "__init__" not in name else "import shardvit.launch\n")
    for name in ("script.py", "mypackage/train.py", "launch/train.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(OWN)


OWN_LINE = "own: data_shards.py launch/steps.py model.py pipeline/steps.py"


@pytest.mark.parametrize("command", ["script.py", "-m mypackage.train", "-m launch.train"])
def test_the_users_modules_of_our_names_are_his_own(command: str, tmp_path: Path):
    lay_own(tmp_path)
    done = python(tmp_path, *command.split(), PYTHONPATH=str(ROOT / "src"))
    assert done.stdout.strip() == OWN_LINE, done.stderr


def test_a_script_beside_them_trains_and_the_ranks_see_none_of_them(tmp_path: Path):
    folder = tmp_path / "repository"
    lay_own(folder)
    (folder / "my.yaml").write_text(RECIPE)
    watch = Watch(tmp_path / "watch")
    paths = os.pathsep.join([str(watch.folder), str(ROOT / "src")])
    assert python(folder, "-P", "-m", "shardvit.launch.cli", *FIRST[0].split(), PYTHONPATH=paths).returncode == 0
    done = python(folder, "script.py", "run", PYTHONPATH=paths)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == OWN_LINE, done.stdout + done.stderr
    ranks = [each for each in watch.seen() if not each.is_kind("script.py")]
    assert all(any(each.is_kind(kind) for each in ranks) for kind in STARTED)
    assert [each for each in ranks if each.searches(folder)] == []


def test_a_folder_that_the_user_has_put_into_pythonpath_stays(tmp_path: Path):
    watch = Watch(tmp_path / "watch")
    paths = os.pathsep.join([str(watch.folder), str(ROOT / "src"), str(tmp_path)])
    assert python(tmp_path, "-m", "shardvit.launch.train", "--help", PYTHONPATH=paths).returncode == 0
    (seen,) = watch.seen()
    assert [path for path in seen.sys_path if path in (str(tmp_path), "")] == [str(tmp_path)]


@pytest.mark.parametrize("module", ["shardvit.launch.cli", "shardvit.launch.train", "shardvit.launch.local.torchrun"])
def test_a_module_of_ours_drops_the_folder_when_python_has_put_it_there(module: str, tmp_path: Path):
    """Without -P, as a launcher starts it."""
    sprung = lay_traps(tmp_path / "folder")
    done = python(tmp_path / "folder", "-m", module, "--help")
    assert (done.returncode, sprung()) == (0, []), done.stderr


@pytest.mark.parametrize("module", ["shardvit.launch.cli", "launch.cli"])
def test_a_clone_that_is_not_installed_runs_from_its_top_folder(module: str):
    done = python(ROOT, "-m", module, "recipes", "digits", PYTHONPATH="")
    assert done.returncode == 0 and "stages:" in done.stdout, done.stderr


def test_a_clone_that_is_not_installed_is_found_by_what_it_starts():
    script = "import os, sys; sys.argv = ['-m']; sys.orig_argv = ['python', '-m', 'shardvit.launch.train']; "
    script += "sys.path[0] = os.getcwd(); import shardvit.launch; print(os.environ['PYTHONPATH'])"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split(os.pathsep)[-1].strip() == str(ROOT / "src")


def test_the_users_own_commands_import_as_they_always_do(monkeypatch: pytest.MonkeyPatch):
    ((name, value),) = SAFE_PATH.items()
    monkeypatch.setenv(name, value)
    command = f"pipe:printenv {name} || echo unset"
    assert b"".join(pipe_pieces(command, stall_seconds=60, stop=lambda: False)) == b"unset\n"
    assert users_environment({name: value, "A": "1"}) == {"A": "1"}
    assert users_environment({name: "1", "A": "1"}) == {name: "1", "A": "1"}  # the user's own

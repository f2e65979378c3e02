"""Nothing in the working folder is imported, whatever it is called: by no command, and by nothing that one starts."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardvit.data_shards.store.commands import pipe_pieces
from shardvit.data_shards.working_folder import SAFE_PATH, users_environment
from tests.conftest import ROOT
from tests.traps import lay_traps

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
MORE = (
    "show shards/train --output show.html",
    "plan my.yaml --gpus 2 --gpu h200",
    "run my.yaml --dry-run",
    "predict runs/small show.png",
    "transfer runs/small shards/train shards/val --method knn",
    "transfer runs/small shards/train shards/val --method fewshot --shots 5",
    "figures runs/small show.png",
    "watch runs/small --once",
    "export runs/small --format npz",
    "export runs/small --format onnx",
    "sync runs/small",
    "doctor",
)


def python(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SHARDVIT_PICTURES": "auto", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run_all(folder: Path, commands: Sequence[str]) -> None:
    """Each ends in order, and none springs a trap."""
    sprung = lay_traps(folder)
    (folder / "my.yaml").write_text(RECIPE)
    for command in commands:
        if command in MORE and not (folder / "show.png").exists():
            (folder / "show.png").write_bytes(next((folder / "runs").rglob("pictures/**/*.png")).read_bytes())
        done = python(folder, "-P", "-m", "shardvit.launch.cli", *command.split())  # -P: as the console script
        assert done.returncode == 0 or command == "doctor", f"{command}\n{done.stdout}\n{done.stderr}"
        assert sprung() == [], command


def test_commands_and_all_that_they_start_run_in_a_repository_of_the_same_names(tmp_path: Path):
    run_all(tmp_path / "repository", FIRST)
    assert list(tmp_path.rglob("pictures/**/*.png")), "nothing was drawn"


@pytest.mark.slow
def test_every_command_does(tmp_path: Path):
    run_all(tmp_path / "repository", (*FIRST, *MORE))


@pytest.mark.parametrize("module", ["shardvit.launch.cli", "shardvit.launch.train", "shardvit.launch.local.torchrun"])
def test_a_module_of_ours_drops_the_folder_when_python_has_put_it_there(module: str, tmp_path: Path):
    """Without -P, as a launcher starts it."""
    sprung = lay_traps(tmp_path / "folder")
    done = python(tmp_path / "folder", "-m", module, "--help")
    assert (done.returncode, sprung()) == (0, []), done.stderr


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

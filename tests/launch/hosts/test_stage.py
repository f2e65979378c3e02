"""The pure parts of a stage on hosts: the command of a node, the one exit code, the ssh command."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.launch.hosts.hostfile import Fleet, Host, HostOptions
from shardvit.launch.hosts.remote import ssh_command
from shardvit.launch.hosts.stage import node_command, shared_files
from shardvit.launch.local.processes import overall_code
from shardvit.launch.local.start import Launch
from shardvit.launch.train import _parse
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.stage.stage_data import open_data
from tests.launch.machine import make_shards

FLEET = Fleet((Host("a", (0, 1)), Host("b", (3,))), Path("hosts"))
LAUNCH = Launch(load_recipe("digits"), Path("some runs/a b;c/recipe.yaml"), Path("some runs"), "finetune", processes=3)


def test_a_node_is_told_its_place_and_its_ranks_everything():
    command = node_command(LAUNCH, FLEET, node=1, master_addr="10.0.0.1")
    assert command[:4] == [sys.executable, "-u", "-m", "deepspeed.launcher.launch"]
    assert "--node_rank=1" in command and "--master_addr=10.0.0.1" in command
    (world,) = [word.removeprefix("--world_info=") for word in command if word.startswith("--world_info=")]
    assert json.loads(base64.urlsafe_b64decode(world)) == {"a": [0, 1], "b": [3]}
    options = _parse(command[command.index("shardvit.launch.train") + 1 :])
    assert (options.recipe, options.overrides) == ("some runs/a b;c/recipe.yaml", [])
    assert (options.stages, options.runs) == (["finetune"], Path("some runs"))


@pytest.mark.parametrize(
    ("codes", "asked", "code"),
    [
        ([0, 0], False, 0),
        ([75, 75], True, 75),
        ([75, 0], True, 75),
        ([1, 75], True, 75),  # one that was still importing
        ([247, 1], False, 247),  # the first is the cause, the others follow
        ([1, 247], False, 1),
        ([1, 2], False, 2),  # somebody's mistake, which the others could not know of
        ([143, 75], False, 143),
        ([0, 1], True, 1),
    ],
)
def test_the_code_that_says_most_is_the_stages(codes: list[int], asked: bool, code: int):
    assert overall_code(codes, stop_was_asked=asked) == code


def test_ssh_asks_no_questions_and_any_path_arrives(tmp_path: Path):
    folder = tmp_path / "a folder; with $signs"
    folder.mkdir()
    words = ["-c", "import os, sys; print(os.getcwd(), os.environ.get('PYTHONPATH'), sys.argv[1])", "it's $HOME"]
    command = ssh_command("worker", words, python_path="/a b:/c", folder=folder)
    assert command[0] == "ssh" and "BatchMode=yes" in command and command[-2] == "worker"
    done = subprocess.run(["sh", "-c", command[-1]], capture_output=True, text=True, check=True)  # as sshd does
    assert done.stdout == f"{folder} /a b:/c it's $HOME\n"
    gone = ssh_command("worker", ["-V"], python_path="", folder=tmp_path / "absent")
    assert subprocess.run(["sh", "-c", gone[-1]], capture_output=True, check=False).returncode == 96


def test_of_each_local_folder_of_shards_the_manifest_is_compared(tmp_path: Path):
    for split in ("train", "val"):
        make_shards(tmp_path / split)
    keys = [f"stages.pretrain.{key}={tmp_path / split}" for key, split in (("train", "train"), ("eval", "val"))]
    data = open_data(load_recipe("digits", overrides=keys), stage="pretrain", report=lambda text: None)
    assert shared_files((data.train, data.eval)) == [tmp_path / split / "manifest.json" for split in ("train", "val")]
    (tmp_path / "val" / "manifest.json").unlink()
    assert shared_files((data.eval,)) == [tmp_path / "val" / "a.tar"]


def test_what_is_wrong_with_the_command_line_is_told_before_any_host_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hostfile = tmp_path / "hosts"
    with pytest.raises(UserError, match=r"--hostfile .*hosts cannot be read \(No such file"):
        HostOptions(hostfile).fleet()
    hostfile.write_text("a slots=2\nb slots=2\n")
    (tmp_path / "ssh").write_text("")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    fleet = HostOptions(hostfile, include="b").fleet()
    assert fleet is not None and fleet.processes == 2
    with pytest.raises(UserError, match="--master-port: it is 70000"):
        HostOptions(hostfile, master_port=70000).fleet()
    (tmp_path / "ssh").unlink()
    with pytest.raises(UserError, match="there is no ssh on this machine"):
        HostOptions(hostfile).fleet()

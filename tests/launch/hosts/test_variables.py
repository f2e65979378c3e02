"""What travels to the hosts is what DeepSpeed says travels, and its file is read as it reads it."""

from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.launch.hosts.variables import DEEPSPEED_PREFIXES, parse_environment, travelling


def test_prefixes_and_files_travel_and_nothing_else(tmp_path: Path):
    home, here = tmp_path / "home", tmp_path / "here"
    for folder, text in ((home, "A=home\nNCCL_DEBUG=WARN\n"), (here, "A = a value with = and spaces \n\n# comment\n")):
        folder.mkdir()
        (folder / ".deepspeed_env").write_text(text)
    environ = {"NCCL_DEBUG": "INFO", "MLFLOW_TRACKING_TOKEN": "secret", "PATH": "/bin", "HOME": "/root"}
    environ |= {"SHARDVIT_SUPERVISOR_PID": "1", "SHARDVIT_RENDEZVOUS": "/x"}  # of a run around this one
    found, told = travelling(environ, folders=(home, here))
    assert found == {"NCCL_DEBUG": "WARN", "MLFLOW_TRACKING_TOKEN": "secret", "A": "a value with = and spaces"}
    assert "MLFLOW_TRACKING_TOKEN" in told and "secret" not in told and str(here / ".deepspeed_env") in told


def test_the_file_may_have_another_name(tmp_path: Path):
    (tmp_path / "mine").write_text("A=1\n")
    assert travelling({"DS_ENV_FILE": "mine"}, folders=(tmp_path,))[0] == {"A": "1"}
    assert travelling({"DS_ENV_FILE": str(tmp_path / "mine")}, folders=(Path("/nowhere"),))[0] == {"A": "1"}


@pytest.mark.parametrize("line", ["export A=1", "A", "=1", "A B=1"])
def test_a_line_that_is_no_assignment_is_named(line: str):
    with pytest.raises(UserError, match="mine, line 2: write NAME=VALUE"):
        parse_environment(f"X=1\n{line}\n", source="mine")


def test_the_prefixes_are_those_of_the_installed_deepspeed():
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from deepspeed.launcher.runner import EXPORT_ENVS

    theirs = [*EXPORT_ENVS, *CUDA_Accelerator.export_envs(object.__new__(CUDA_Accelerator))]
    assert sorted(DEEPSPEED_PREFIXES) == sorted(theirs)

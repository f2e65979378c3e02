"""What goes through DeepSpeed's pdsh launcher arrives as it was: DeepSpeed's own code and a real shell are asked."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from data_shards.errors import UserError
from launch.hosts import pdsh
from launch.hosts.hostfile import Fleet, Host

FLEET = Fleet((Host("a", (0, 2)), Host("b", (1,))), Path("hosts"), launcher="pdsh")


def through_deepspeed(arguments: list[str], variables: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Arguments and variables as a host gets them: what pdsh would have its shell run, run by a shell here."""
    from deepspeed.launcher import runner
    from deepspeed.launcher.multinode_runner import PDSHRunner

    command = pdsh.command(FLEET, arguments, hostfile=Path("x"), master_addr="10.0.0.1", master_port=29500)
    options = runner.parse_args(command[command.index("deepspeed.launcher.runner") + 1 :])
    assert options.include == "a:0,2@b:1" and options.user_script == "launch.train" and options.module
    launcher = PDSHRunner(options, "world")
    for line in pdsh.environment_text(variables).splitlines():
        launcher.add_export(*line.split("=", maxsplit=1))
    words, _, _ = launcher.get_cmd({}, {"a": [0, 2], "b": [1]})
    exports = words[words.index("-w") + 2]
    told = " ".join(words[words.index("launch.train") + 1 :])
    shown = subprocess.run(
        ["sh", "-c", f"{exports} printf '%s\\0' {told}; env -0"], capture_output=True, text=True, check=True
    ).stdout.split("\0")
    environment = dict(part.split("=", maxsplit=1) for part in shown[len(arguments) :] if "=" in part)
    return shown[: len(arguments)], environment


def test_arguments_and_variables_arrive_as_they_were():
    arguments = ["my recipes/a.yaml", "train=shards/{000..007}.tar", "a=$HOME", "b='c;d'", "e=[1, 2]", 'f="x y"', "g=*"]
    variables = {"MARK": "/a folder/with: signs", "PLAIN": "1", "STAR": "*"}
    told, environment = through_deepspeed(arguments, variables)
    assert told == arguments
    assert {name: environment[name] for name in variables} == variables


@pytest.mark.parametrize("argument", ["a b $HOME", "a `b`", "a\\ b", "a b!"])
def test_an_argument_that_would_not_arrive_is_refused(argument: str):
    with pytest.raises(UserError, match="use --launcher ssh"):
        pdsh.command(FLEET, [argument], hostfile=Path("x"), master_addr="a", master_port=1)


@pytest.mark.parametrize("value", ['say "x"', "$HOME", "a\nb", "a`b`"])
def test_a_variable_that_would_not_arrive_is_refused(value: str):
    with pytest.raises(UserError, match=r"the variable A holds .* use --launcher ssh"):
        pdsh.environment_text({"A": value})


def test_the_hostfile_and_the_filter_name_the_slots():
    from deepspeed.launcher.runner import _parse_hostfile, parse_inclusion_exclusion

    pool = _parse_hostfile(pdsh.hostfile_text(FLEET).splitlines())
    assert parse_inclusion_exclusion(pool, pdsh.include_text(FLEET), "") == {"a": [0, 2], "b": [1]}


def test_a_word_needs_no_second_shell():
    assert shlex.split(pdsh.command(FLEET, ["a;b"], hostfile=Path("x"), master_addr="a", master_port=1)[-1]) == ["a;b"]

"""The command line in this process."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardvit.launch import cli
from shardvit.launch.run import pipeline_run
from tests.launch.machine import Machine, make_shards

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """`shardvit ...` in this process: exit code, standard output, standard error."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shardvit", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        output = capsys.readouterr()
        return int(caught.value.code or 0), output.out, output.err

    return run


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine without GPUs, and packed shards."""
    machine = Machine(tmp_path)
    for split in ("train", "val"):
        make_shards(tmp_path / "shards" / split)
    monkeypatch.setattr(pipeline_run, "run_stage_locally", machine.start)
    monkeypatch.setattr(pipeline_run, "num_gpus", lambda: 0)
    return machine

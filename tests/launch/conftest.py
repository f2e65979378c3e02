"""The command line in this process."""

import sys
from collections.abc import Callable

import pytest

from launch import cli

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

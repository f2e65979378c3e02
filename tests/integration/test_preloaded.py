"""The forks that stand for processes in the tests of this folder: from outside they are processes of their own."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conftest import RunCli

PATIENCE_SECONDS = 240.0


@pytest.mark.parametrize(
    "words", [["run", "nothing.yaml"], ["run", "mine.yaml", "--dry-run", "model.width=nope"]], ids=str
)
def test_a_fork_answers_as_a_process_of_its_own(
    words: list[str], tmp_path: Path, run_cli: RunCli, run_preloaded: RunCli
):
    (tmp_path / "mine.yaml").write_text("name: mine\n")
    ours, theirs = (run(*words, cwd=tmp_path) for run in (run_preloaded, run_cli))
    assert (ours.returncode, ours.stdout, ours.stderr) == (theirs.returncode, theirs.stdout, theirs.stderr)
    assert ours.returncode == 2 and ours.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_fork_hears_signals_and_does_not_outlive_its_caller(
    number: signal.Signals, tmp_path: Path, preloaded_environment: Mapping[str, str]
):
    caller = subprocess.Popen(
        [sys.executable, "-u", "-m", "tests.preloaded.waiting", "a word", "and another"],
        cwd=tmp_path,
        env={**os.environ, **preloaded_environment, "GIVEN": "this"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with caller:
        assert caller.stdin and caller.stdout
        caller.stdin.write("input")
        caller.stdin.close()
        assert caller.stdout.readline() == f"['a word', 'and another'] {tmp_path} this input\n"
        caller.send_signal(number)
        assert caller.stdout.read() == ""  # to its end: the fork has let go of it
        assert caller.wait(timeout=PATIENCE_SECONDS) == -number

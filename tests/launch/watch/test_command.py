"""The command on a terminal, into a pipe, and when it is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.cli import app
from launch.watch import command
from tests.launch.watch.test_page import Run
from tests.terminal import terminal


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_once_prints_the_page_without_escape_sequences(run: Run) -> None:
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "80", "LANG": "C.UTF-8"}
    said = subprocess.run(
        [sys.executable, "-m", "launch.cli", "watch", str(run.folder.path), "--once"],
        capture_output=True,
        env=environment,
        check=False,
    )
    assert said.returncode == 0 and b"400 of 800" in said.stdout and b"\x1b" not in said.stdout
    assert said.stderr == b""


def test_on_a_terminal_it_is_drawn_anew_until_ctrl_c_which_is_no_failure(run: Run) -> None:
    with terminal(lines=24, columns=80) as (stream, shown):
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.cli", "watch", str(run.folder.path), "--interval", "0.2"],
            stdout=stream,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8"},
        )
        wait_for(shown, b"400 of 800", process)
        run.log(range(450, 501, 50), resume_step=400)
        wait_for(shown, b"500 of 800", process)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0
    whole = bytes(shown)
    assert whole.index(b"\x1b[?1049h") < whole.rindex(b"\x1b[?1049l")  # a screen of its own, and left again
    after = whole.rpartition(b"\x1b[?1049l")[2]
    assert b"500 of 800" in after  # the last page stays
    assert b"\x1b[?25h" in whole  # the cursor is back


def test_a_run_that_is_done_ends_it(run: Run) -> None:
    for stage in ("pretrain", "swap_head", "finetune"):
        run.folder.update(stage, state="done")
    with terminal(lines=24, columns=80) as (stream, shown):
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.cli", "watch", str(run.folder.path)],
            stdout=stream,
            env={**os.environ, "TERM": "xterm-256color"},
        )
        assert process.wait(timeout=120) == 0
    assert bytes(shown).count(b"done") >= 3


@pytest.mark.parametrize("interval", ["0", "-1", "nan"])
def test_an_interval_without_a_pause_is_refused(run: Run, interval: str) -> None:
    from data_shards.errors import UserError

    with pytest.raises(UserError, match="--interval"):
        command.watch(run.folder.path, interval=float(interval))


def test_help_does_not_import_what_draws() -> None:
    code = "import sys, launch.cli; sys.exit('rich.live' in sys.modules or 'launch.watch.page' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert "watch" in {name for name in app if not name.startswith("-")}


def wait_for(shown: bytearray, text: bytes, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while text not in bytes(shown):
        assert process.poll() is None and time.monotonic() < deadline, bytes(shown)[-2000:]
        time.sleep(0.05)

"""The command on a terminal, into a pipe, and when it is interrupted."""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Literal

import pytest

from launch.commands.results import watch as command
from tests.launch.watch.test_screen import Run
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


def _on_a_terminal() -> None:
    fcntl.ioctl(1, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup make test` ignores


class Typed:
    """The command on a terminal of its own, which someone types at."""

    def __init__(self, run: Run, stdin: Literal["the terminal", "a pipe"] = "the terminal") -> None:
        self.leader, self.follower = os.openpty()
        termios.tcsetwinsize(self.follower, (24, 80))
        self.before = termios.tcgetattr(self.follower)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launch.cli", "watch", str(run.folder.path), "--interval", "3600"],
            stdin=self.follower if stdin == "the terminal" else subprocess.PIPE,
            stdout=self.follower,
            stderr=self.follower,
            env={**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8"},
            start_new_session=True,
            preexec_fn=_on_a_terminal,
        )
        self.shown = bytearray()

    def sees(self, text: bytes) -> None:
        deadline = time.monotonic() + 120
        while text not in self.shown:
            assert time.monotonic() < deadline, bytes(self.shown)[-2000:]
            if select.select([self.leader], [], [], 0.2)[0]:
                self.shown += os.read(self.leader, 4096)

    def is_left(self) -> None:
        """With exit code 0, its own screen left, and the terminal as it was found."""
        while self.process.poll() is None:
            if select.select([self.leader], [], [], 0.2)[0]:
                self.shown += os.read(self.leader, 4096)
        assert self.process.returncode == 0
        self.sees(b"\x1b[?1049l")
        assert termios.tcgetattr(self.follower) == self.before
        for descriptor in (self.leader, self.follower):
            os.close(descriptor)
        if self.process.stdin is not None:
            self.process.stdin.close()


@pytest.mark.parametrize("how", ["q", "SIGTERM", "SIGHUP", "Ctrl-C"])
def test_q_or_a_signal_leaves_and_the_terminal_is_as_before(run: Run, how: str) -> None:
    typed = Typed(run)
    typed.sees(b"q leaves")
    assert not termios.tcgetattr(typed.follower)[3] & termios.ICANON
    os.write(typed.leader, b"xy")  # no such keys
    if how.startswith("SIG"):
        typed.process.send_signal(signal.Signals[how])
    else:
        os.write(typed.leader, b"q" if how == "q" else b"\x03")
    typed.is_left()


def test_where_standard_input_is_no_terminal_ctrl_c_leaves(run: Run) -> None:
    typed = Typed(run, stdin="a pipe")
    typed.sees(b"Ctrl-C leaves")
    assert termios.tcgetattr(typed.follower) == typed.before
    os.write(typed.leader, b"\x03")
    typed.is_left()


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


def test_a_run_that_is_deleted_ends_it_with_a_sentence(run: Run) -> None:
    with terminal(lines=24, columns=80) as (stream, shown):
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.cli", "watch", str(run.folder.path), "--interval", "0.2"],
            stdout=stream,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TERM": "xterm-256color"},
        )
        wait_for(shown, b"400 of 800", process)
        shutil.rmtree(run.folder.path)
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 2 and "is gone" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("interval", ["0", "-1", "nan"])
def test_an_interval_without_a_pause_is_refused(run: Run, interval: str) -> None:
    from data_shards.errors import UserError

    with pytest.raises(UserError, match="--interval"):
        command.watch(run.folder.path, interval=float(interval))


def wait_for(shown: bytearray, text: bytes, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while text not in bytes(shown):
        assert process.poll() is None and time.monotonic() < deadline, bytes(shown)[-2000:]
        time.sleep(0.05)

"""The command on a terminal, into a pipe, and when it is interrupted."""

import _thread
import fcntl
import io
import os
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from rich.console import Console

from shardvit.launch.commands.results import watch as command
from shardvit.launch.slurm.commands import Slurm
from shardvit.launch.watch.look import Watcher
from tests.launch.watch.test_screen import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_once_prints_the_page_without_escape_sequences(run: Run) -> None:
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "80", "LANG": "C.UTF-8"}
    said = subprocess.run(
        [sys.executable, "-m", "shardvit.launch.cli", "watch", str(run.folder.path), "--once"],
        capture_output=True,
        env=environment,
        check=False,
    )
    assert said.returncode == 0 and b"400 of 800" in said.stdout and b"\x1b" not in said.stdout
    assert said.stderr == b""


def _on_a_terminal() -> None:
    fcntl.ioctl(1, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup make test` ignores


class Typed:
    """The command on a terminal of its own, which someone types at."""

    def __init__(
        self, run: Run, stdin: Literal["the terminal", "a pipe"] = "the terminal", *, interval: float = 3600
    ) -> None:
        self.leader, self.follower = os.openpty()
        termios.tcsetwinsize(self.follower, (24, 80))
        self.before = termios.tcgetattr(self.follower)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardvit.launch.cli", "watch", str(run.folder.path), "--interval", str(interval)],
            stdin=self.follower if stdin == "the terminal" else subprocess.PIPE,
            stdout=self.follower,
            stderr=self.follower,
            env={**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8"},
            start_new_session=True,
            preexec_fn=_on_a_terminal,
        )
        self.shown = bytearray()

    def reads(self) -> bool:
        found = bool(select.select([self.leader], [], [], 0.2)[0])
        self.shown += os.read(self.leader, 4096) if found else b""
        return found

    def sees(self, text: bytes) -> None:
        deadline = time.monotonic() + 120
        while text not in self.shown:
            assert time.monotonic() < deadline, bytes(self.shown)[-2000:]
            self.reads()

    def is_left(self, *, code: int = 0) -> bytes:
        """With that exit code, its own screen left, and the terminal as it was found; returns what stays there."""
        while self.reads() or self.process.poll() is None:
            pass
        assert self.process.returncode == code
        assert termios.tcgetattr(self.follower) == self.before
        for descriptor in (self.leader, self.follower):
            os.close(descriptor)
        if self.process.stdin is not None:
            self.process.stdin.close()
        whole = bytes(self.shown)
        assert whole.index(b"\x1b[?1049h") < whole.rindex(b"\x1b[?1049l")  # a screen of its own, and left again
        assert b"\x1b[?25h" in whole  # the cursor is back
        return whole.rpartition(b"\x1b[?1049l")[2]


def test_on_a_terminal_it_is_drawn_anew_until_ctrl_c_which_is_no_failure(run: Run) -> None:
    typed = Typed(run, interval=0.2)
    typed.sees(b"400 of 800")
    run.log(range(450, 501, 50), resume_step=400)
    typed.sees(b"500 of 800")
    os.write(typed.leader, b"\x03")
    assert b"500 of 800" in typed.is_left()  # the last page stays


@pytest.mark.parametrize("how", ["q", "SIGTERM", "SIGHUP"])
def test_q_or_a_signal_leaves_and_the_terminal_is_as_before(run: Run, how: str) -> None:
    typed = Typed(run)
    typed.sees(b"q leaves")
    assert not termios.tcgetattr(typed.follower)[3] & termios.ICANON
    os.write(typed.leader, b"xy")  # no such keys
    if how.startswith("SIG"):
        typed.process.send_signal(signal.Signals[how])
    else:
        os.write(typed.leader, b"q")
    typed.is_left()


def test_where_standard_input_is_no_terminal_ctrl_c_leaves(run: Run) -> None:
    typed = Typed(run, stdin="a pipe")
    typed.sees(b"Ctrl-C leaves")
    assert termios.tcgetattr(typed.follower) == typed.before
    os.write(typed.leader, b"\x03")
    typed.is_left()


def test_ctrl_c_just_before_the_system_call_that_waits_leaves_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(*arguments: Any) -> Any:
        threading.Timer(0.1, _thread.interrupt_main).start()  # Python's mark of the signal, without the signal
        return selects(*arguments)

    selects = select.select
    monkeypatch.setattr(command.select, "select", waits)
    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(KeyboardInterrupt):
        command.follow(Watcher(run.folder.path, slurm=Slurm()), console=console, interval_seconds=3600)


def test_a_run_that_is_done_ends_it(run: Run) -> None:
    for stage in ("pretrain", "swap_head", "finetune"):
        run.folder.update(stage, state="done")
    assert Typed(run).is_left().count(b"done") >= 3


def test_a_run_that_is_deleted_ends_it_with_a_sentence(run: Run) -> None:
    typed = Typed(run, interval=0.2)
    typed.sees(b"400 of 800")
    shutil.rmtree(run.folder.path)
    said = typed.is_left(code=2)
    assert b"is gone" in said and b"Traceback" not in said


@pytest.mark.parametrize("interval", ["0", "-1", "nan"])
def test_an_interval_without_a_pause_is_refused(run: Run, interval: str) -> None:
    from shardvit.data_shards.errors import UserError

    with pytest.raises(UserError, match="--interval"):
        command.watch(run.folder.path, interval=float(interval))

"""Helping processes: deaf to Ctrl-C from their first instruction on, while the one that started them is not."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardvit.data_shards import processes
from shardvit.data_shards.processes import block_interrupts, num_cores
from tests.data_shards.opened import wait_until

ROOT = Path(__file__).resolve().parents[2]

INTERRUPTS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('still here')"


def child(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, cwd=ROOT).stdout


@pytest.mark.parametrize(("quota", "cores"), [(0.5, 1), (1.5, 2), (3.0, 3), (64.0, 4), (None, 4)])
def test_cores_are_those_that_affinity_and_control_group_leave(
    quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processes, "core_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 5}, raising=False)
    assert num_cores() == cores


def test_what_is_started_meanwhile_is_deaf():
    with block_interrupts():
        assert child(INTERRUPTS_ITSELF) == "still here\n"
    assert child(INTERRUPTS_ITSELF) == ""


# In a process of its own: here there may be other threads, and a signal goes to any thread that is not deaf to it.
COMES_LATE = """
import os, signal, time
import pytest

from shardvit.data_shards import processes
from shardvit.data_shards.processes import block_interrupts
try:
    with block_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        print("reached")
    time.sleep(200)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_comes_late_but_comes():
    assert child(COMES_LATE) == "reached\ninterrupted\n"


def test_there_is_a_core():
    assert 1 <= num_cores() <= (os.cpu_count() or 1)


def wait_long(_: object, part: int) -> None:
    logging.getLogger("shardvit.it").warning("%d", os.getpid())
    time.sleep(600)


WAITS = """
from shardvit.data_shards.processes import run_parts
from tests.data_shards.test_processes import wait_long
run_parts(wait_long, None, [1, 2], processes=2, done=print)
"""


def test_what_helps_a_command_tells_its_warnings_and_ends_with_it_even_by_a_kill():
    with subprocess.Popen([sys.executable, "-c", WAITS], stderr=subprocess.PIPE, text=True, cwd=ROOT) as command:
        assert command.stderr is not None
        helpers = [int(command.stderr.readline()) for _ in range(2)]
        command.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, helpers)))


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False

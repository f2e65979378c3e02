"""Helping processes: deaf to Ctrl-C from their first instruction on, while the one that started them is not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_shards import processes
from data_shards.processes import deaf_to_interrupts, num_cores

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
    with deaf_to_interrupts():
        assert child(INTERRUPTS_ITSELF) == "still here\n"
    assert child(INTERRUPTS_ITSELF) == ""


# In a process of its own: here there may be other threads, and a signal goes to any thread that is not deaf to it.
COMES_LATE = """
import os, signal, time
import pytest

from data_shards import processes
from data_shards.processes import deaf_to_interrupts
try:
    with deaf_to_interrupts():
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

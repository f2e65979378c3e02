"""Helping processes: deaf to Ctrl-C from their first instruction on, while the one that started them is not."""

import os
import signal
import subprocess
import sys

import pytest

from data_shards.processes import deaf_to_interrupts, num_cores

INTERRUPTS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('still here')"


def child() -> str:
    command = [sys.executable, "-c", INTERRUPTS_ITSELF]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240).stdout


def test_what_is_started_meanwhile_is_deaf():
    with deaf_to_interrupts():
        assert child() == "still here\n"
    assert child() == ""


def test_an_interrupt_comes_late_but_comes():
    reached = False
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - what is tested is where it comes
        with deaf_to_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            reached = True
        signal.sigtimedwait([], 5)
    assert reached


def test_there_is_a_core():
    assert 1 <= num_cores() <= (os.cpu_count() or 1)

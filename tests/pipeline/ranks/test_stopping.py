"""Stopping: a signal raises the flag, the ranks agree one step later, and a second Ctrl-C ends the process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardvit.launch.local.processes import handled
from shardvit.pipeline.ranks.stopping import Requests, StopFlag, StopOrSave
from shardvit.pipeline.recipe.vocabulary import EXIT_STOPPED

ROOT = Path(__file__).resolve().parents[3]
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


@pytest.fixture
def flag() -> Iterator[StopFlag]:
    before = {number: signal.getsignal(number) for number in STOPS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever started these tests
    flag = StopFlag()
    flag.listen()
    yield flag
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_raises_the_flag_and_nothing_else(flag: StopFlag, number: signal.Signals):
    assert flag.reason is None
    os.kill(os.getpid(), number)
    assert flag.reason == number.name


def test_nohup_is_heeded(monkeypatch: pytest.MonkeyPatch):
    """A terminal that is gone stops a run like SIGTERM, but for one that is to outlive it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        flag, asked = StopFlag(), []
        with handled(STOPS, lambda number, frame: asked.append(number)):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(signal, "signal", lambda number, handler: asked.append(number))
        flag.listen()
        assert asked.count(signal.SIGTERM) == 2 and signal.SIGHUP not in asked and flag.reason is None
        monkeypatch.undo()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_first_reason_stays(flag: StopFlag):
    flag.request("the death of its launcher")
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # launchers repeat it: no harm
    assert flag.reason == "the death of its launcher"


def test_a_second_ctrl_c_ends_the_process():
    code = """
import os, signal
from shardvit.pipeline.ranks.stopping import StopFlag
flag = StopFlag()
flag.listen()
os.kill(os.getpid(), signal.SIGINT)
print("alive after one", flush=True)
os.kill(os.getpid(), signal.SIGINT)
print("alive after two", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout == "alive after one\n"
    assert done.returncode == -signal.SIGINT


def requests(flag: StopFlag, **options: float) -> Requests:
    return Requests(flag, saved_step=0, **options)


def test_what_is_requested_in_a_step_is_carried_out_after_the_next_one_however_early_it_is_heard():
    both = StopOrSave(stop=True, save=True, is_saving=True)
    for heard_before in (1, 2):  # after step 1 itself, or only after step 2
        exchange = requests(StopFlag())
        answers = []
        for step in (1, 2, 3):
            if step == heard_before:
                exchange.heard(1, both)
            answers.append(exchange.agreed(step))
        assert answers == [StopOrSave(), both, StopOrSave()]


def test_a_checkpoint_requested_before_one_was_saved_is_not_made():
    exchange = requests(StopFlag())
    exchange.heard(7, StopOrSave(save=True))
    exchange.saved(7)
    assert exchange.agreed(8) == StopOrSave()
    exchange.heard(9, StopOrSave(save=True))
    assert exchange.agreed(10) == StopOrSave(save=True)


def test_a_rank_requests_what_its_flag_says():
    flag = StopFlag()
    exchange = requests(flag)
    assert exchange.mine == StopOrSave()
    flag.request("SIGTERM")
    assert exchange.mine == StopOrSave(stop=True)


def test_a_checkpoint_is_requested_when_the_last_one_is_old(monkeypatch: pytest.MonkeyPatch):
    now = [1000.0]
    # The module's alone: other threads of this process ask time.monotonic too.
    monkeypatch.setattr("shardvit.pipeline.ranks.stopping.time", SimpleNamespace(monotonic=lambda: now[0]))
    exchange, never = requests(StopFlag(), save_minutes=2.0), requests(StopFlag())

    def due(at: float) -> bool:
        now[0] = at
        return exchange.mine.save

    assert [due(1000.0), due(1119.0), due(1120.0), due(1500.0)] == [False, False, True, True]
    exchange.saved(3)
    assert [due(1619.0), due(1620.0)] == [False, True]
    now[0] = 1e9
    assert not never.mine.save


def test_the_exit_code_is_the_one_that_schedulers_know():
    assert EXIT_STOPPED == os.EX_TEMPFAIL

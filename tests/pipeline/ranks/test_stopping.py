"""Stopping: a signal raises the flag, the ranks agree one step later, and a second Ctrl-C ends the process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.processes import handled
from pipeline.ranks.group import Ranks
from pipeline.ranks.stopping import Agreed, Requests, StopFlag
from pipeline.vocabulary import EXIT_STOPPED

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
from pipeline.ranks.stopping import StopFlag
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


class Answer:
    def __init__(self, *flags: bool) -> None:
        self.flags, self.taken = flags, False

    def result(self) -> tuple[bool, ...]:
        self.taken = True
        return self.flags


class Several:
    """Stands in for `Ranks`: one of the others asks for a stop at step `at`."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.asked = at, list[Answer]()

    def start_any(self, stop: bool, save: bool) -> Answer:
        self.asked.append(Answer(stop or len(self.asked) == self.at, save))
        return self.asked[-1]


def requests(flag: StopFlag, ranks: object, **options: float) -> Requests:
    return Requests(flag, ranks=ranks, saved_step=0, **options)  # pyright: ignore[reportArgumentType]


def stops(exchange: Requests, *, times: int) -> list[bool]:
    return [exchange.agreed(10).stop for _ in range(times)]


def test_all_ranks_stop_one_step_after_the_first_one_asked():
    here = StopFlag()
    exchange = requests(here, Several())
    assert stops(exchange, times=3) == [False, False, False]
    here.request("SIGTERM")
    assert stops(exchange, times=2) == [False, True]
    elsewhere = StopFlag()
    assert stops(requests(elsewhere, Several(at=2)), times=4) == [False, False, False, True]
    assert elsewhere.reason is None


def test_a_request_to_save_is_carried_beside_and_stops_nobody(monkeypatch: pytest.MonkeyPatch):
    exchange, due = requests(StopFlag(), Several()), iter([False, True, False, False])
    monkeypatch.setattr(exchange, "_save_is_due", lambda: next(due))
    answers = [exchange.agreed(10) for _ in range(4)]
    assert answers == [Agreed(stop=False, save=save) for save in (False, False, True, False)]


def test_a_checkpoint_is_requested_when_the_last_one_is_old(monkeypatch: pytest.MonkeyPatch):
    now = [1000.0]
    # The module's alone: other threads of this process ask time.monotonic too.
    monkeypatch.setattr("pipeline.ranks.stopping.time", SimpleNamespace(monotonic=lambda: now[0]))
    exchange, never = requests(StopFlag(), Several(), save_minutes=2.0), requests(StopFlag(), Several())

    def due(at: float) -> bool:
        now[0] = at
        return exchange._save_is_due()

    assert [due(1000.0), due(1119.0), due(1120.0), due(1500.0)] == [False, False, True, True]
    exchange.saved(3)
    assert [due(1619.0), due(1620.0)] == [False, True]
    now[0] = 1e9
    assert not never._save_is_due()


def test_settling_takes_in_the_last_answer():
    ranks = Several()
    exchange = requests(StopFlag(), ranks)
    exchange.wait()  # nothing requested yet
    stops(exchange, times=2)
    assert [answer.taken for answer in ranks.asked] == [True, False]
    exchange.wait()
    assert [answer.taken for answer in ranks.asked] == [True, True]


def test_real_ranks_agree_one_step_later(alone: Ranks):
    flag = StopFlag()
    exchange = requests(flag, alone)
    assert stops(exchange, times=1) == [False]
    flag.request("SIGTERM")
    assert stops(exchange, times=2) == [False, True]
    exchange.wait()


@pytest.fixture
def alone() -> Iterator[Ranks]:
    from pipeline.ranks.place import Place

    ranks = Ranks(Place(), timeout_seconds=60)
    yield ranks
    ranks.leave()


def test_the_exit_code_is_the_one_that_schedulers_know():
    assert EXIT_STOPPED == os.EX_TEMPFAIL

"""Stopping: a signal raises the flag, the ranks agree one step later, and a second Ctrl-C ends the process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.ranks import Ranks
from pipeline.stopping import EXIT_STOPPED, StopFlag

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def flag() -> Iterator[StopFlag]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    flag = StopFlag()
    flag.listen()
    yield flag
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_raises_the_flag_and_nothing_else(flag: StopFlag, number: signal.Signals):
    assert flag.reason is None
    os.kill(os.getpid(), number)
    assert flag.reason == number.name


def test_the_first_reason_stays(flag: StopFlag):
    flag.request("the death of its launcher")
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # launchers repeat it: no harm
    assert flag.reason == "the death of its launcher"


def test_a_second_ctrl_c_ends_the_process():
    code = """
import os, signal
from pipeline.stopping import StopFlag
flag = StopFlag()
flag.listen()
os.kill(os.getpid(), signal.SIGINT)
print("alive after one", flush=True)
os.kill(os.getpid(), signal.SIGINT)
print("alive after two", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "alive after one\n"
    assert done.returncode == -signal.SIGINT


class Answer:
    def __init__(self, flag: bool) -> None:
        self.flag, self.taken = flag, False

    def result(self) -> bool:
        self.taken = True
        return self.flag


class Several:
    """Stands in for `Ranks`: one of the others asks for a stop at step `at`."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.asked = at, list[Answer]()

    def start_any(self, flag: bool) -> Answer:
        self.asked.append(Answer(flag or len(self.asked) == self.at))
        return self.asked[-1]


def test_all_ranks_stop_one_step_after_the_first_one_asked():
    here, ranks = StopFlag(), Several()
    assert [here.agreed(ranks) for _ in range(3)] == [False, False, False]
    here.request("SIGTERM")
    assert [here.agreed(ranks), here.agreed(ranks)] == [False, True]
    elsewhere, ranks = StopFlag(), Several(at=2)
    assert [elsewhere.agreed(ranks) for _ in range(4)] == [False, False, False, True]
    assert elsewhere.reason is None


def test_settling_takes_in_the_last_answer():
    flag, ranks = StopFlag(), Several()
    flag.settle()  # nothing asked yet
    flag.agreed(ranks)
    flag.agreed(ranks)
    assert [answer.taken for answer in ranks.asked] == [True, False]
    flag.settle()
    assert [answer.taken for answer in ranks.asked] == [True, True]


def test_real_ranks_agree_one_step_later(alone: Ranks):
    flag = StopFlag()
    assert not flag.agreed(alone)
    flag.request("SIGTERM")
    assert not flag.agreed(alone)
    assert flag.agreed(alone)
    flag.settle()


@pytest.fixture
def alone() -> Iterator[Ranks]:
    from launch.env import free_port
    from pipeline.process import Place

    ranks = Ranks(Place(master_port=free_port()), timeout_seconds=60)
    yield ranks
    ranks.leave()


def test_the_exit_code_is_the_one_that_schedulers_know():
    assert EXIT_STOPPED == os.EX_TEMPFAIL

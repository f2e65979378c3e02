"""Where the seconds before the first step go: parts that add up, told once, and aloud only what lasts."""

import queue
import re
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest

from shardvit.pipeline.ranks import start_clock
from shardvit.pipeline.ranks.start_clock import StartClock

PATIENCE_SECONDS = 240.0
TICK_SECONDS = 0.01


def test_the_parts_add_up_and_are_told_once():
    said: list[str] = []
    clock = StartClock("pretrain", say=said.append, earlier_seconds=2.0, earlier_cpu_seconds=1.5)
    clock.set_status("importing libraries")
    clock.set_status("opening the engine")
    clock.set_status("importing libraries")  # some come later
    clock.first_step_done()
    clock.first_step_done()
    clock.set_status("opening the engine")
    told = [line for line in said if "first step" in line]
    assert len(told) == 1 and told[0].startswith("pretrain: first step after ")
    assert "starting Python 2." in told[0]
    whole, cpu = (float(number) for number in re.findall(r"([\d.]+) s", told[0]))
    assert whole >= 2.0 and cpu >= 1.5


def test_what_lasts_is_said_while_it_lasts():
    aloud = threading.Event()
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        aloud.set()

    clock = StartClock("finetune", say=say)
    clock.set_status("opening shards")
    assert aloud.wait(PATIENCE_SECONDS) and said == ["finetune: opening shards ..."]
    clock.close()


def test_what_goes_on_is_said_again_with_how_far_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(start_clock, "_TOLD_SECONDS", 0.01)
    monkeypatch.setattr(start_clock, "_AGAIN_SECONDS", 0.02)
    said: queue.Queue[str] = queue.Queue()
    with closing(StartClock("probe", say=said.put, part="fitting")) as clock:
        for number in range(3):
            clock.set_status("fitting", f"{number} of 9")
            while said.get(timeout=PATIENCE_SECONDS) != f"probe: fitting, {number} of 9 ...":
                pass  # of before


def test_a_rank_above_0_counts_in_silence():
    before = {thread.name for thread in threading.enumerate()}
    clock = StartClock("pretrain")
    clock.set_status("opening shards")
    clock.first_step_done()
    assert {thread.name for thread in threading.enumerate()} == before
    assert "first step after" in clock.describe()


def test_a_process_knows_its_age_to_a_clock_tick():
    code = f"from time import monotonic as now\nfrom {start_clock.__name__} import seconds_since_start as age\n"
    begun = time.monotonic()
    command = [sys.executable, "-c", f"{code}print(now(), age(), now())"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        started = time.monotonic()
        before, age, after = map(float, process.communicate()[0].split())
    assert before - started <= age <= after - begun + TICK_SECONDS

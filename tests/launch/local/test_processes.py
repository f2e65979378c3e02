"""Ending processes and waiting for threads, where this process itself may have stood still meanwhile."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from launch.local import processes

MARK = ("SHARDVIT_TEST_OF_PROCESSES", str(os.getpid()))


def test_who_stood_still_until_the_time_was_over_kills_all_the_same(monkeypatch: pytest.MonkeyPatch):
    hours = itertools.count(step=3600.0)
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: next(hours), sleep=time.sleep))
    code = "import time; time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, MARK[0]: MARK[1]})
    try:
        deadline = time.monotonic() + 240
        while not processes.marked(*MARK):  # its environment is there from its exec on
            assert time.monotonic() < deadline
            time.sleep(0.02)
        processes.kill_all(*MARK)
        assert child.wait(timeout=240) == -9
    finally:
        child.kill()
        child.wait()


def test_a_thread_is_waited_for_to_its_end_but_not_for_ever():
    over = threading.Event()
    thread = threading.Thread(target=over.wait, daemon=True)
    thread.start()
    processes.join_thread(thread, seconds=0.2)
    assert thread.is_alive()
    over.set()
    processes.join_thread(thread, seconds=240)
    assert not thread.is_alive()

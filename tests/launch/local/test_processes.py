"""Ending processes and waiting for threads, where this process itself may have stood still meanwhile."""

import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardvit.launch.local import processes
from shardvit.launch.local.processes import memory_kills, reason

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


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (75, "stopped and saved"),
        (0, "its launcher was killed"),
        (1, "exit code 1"),
        (143, "signal 15 (SIGTERM)"),
        (241, "signal 15 (SIGTERM)"),
        (245, "signal 11 (SIGSEGV), a crash inside a library"),
        (-7, "signal 7 (SIGBUS), as happens when /dev/shm is too small"),
        (-40, "signal 40 (without a name)"),
    ],
)
def test_an_exit_code_is_put_into_words(code: int, words: str):
    assert words in reason(code, out_of_memory=None)
    assert "memory" not in reason(code, out_of_memory=False)


@pytest.mark.parametrize("code", [247, -9, 137])  # deepspeed's, a plain process's, a shell's
def test_memory_is_blamed_for_a_kill_if_the_kernel_says_so(code: int):
    assert reason(code, out_of_memory=True) == "the kernel killed a process because memory ran out"
    assert reason(code, out_of_memory=False) == "a process was killed by signal 9"
    assert reason(code, out_of_memory=None).endswith("which is what the kernel does when memory runs out")


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_nearest_count_of_kills_for_memory_counts(tmp_path: Path):
    assert memory_kills(tmp_path) is None
    write(tmp_path, "proc/vmstat", "nr_free_pages 3\noom_kill 5\npgfault 9\n")
    assert memory_kills(tmp_path) == 5
    write(tmp_path, "proc/self/cgroup", "0::/job/7\n")
    assert memory_kills(tmp_path) == 5
    write(tmp_path, "sys/fs/cgroup/job/7/memory.events", "low 0\noom 4\noom_kill 2\n")
    assert memory_kills(tmp_path) == 2
    write(tmp_path, "proc/self/cgroup", "9:name=systemd:/\n4:memory:/job\n0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert memory_kills(tmp_path) == 1
    write(tmp_path, "proc/self/cgroup", "nonsense\n")
    assert memory_kills(tmp_path) == 5

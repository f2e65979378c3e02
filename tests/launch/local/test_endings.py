"""Each way in which processes end has its own words, and memory is blamed only when the kernel says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.local.endings import memory_kills, reason


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

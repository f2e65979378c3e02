"""The limit of open files is raised where it may be, and what is missing is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.ranks.open_files import needed_open_files

ROOT = Path(__file__).resolve().parents[3]
CHILD = """
import resource, sys
from pipeline.ranks.open_files import allow_open_files
soft, hard, needed = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
said = allow_open_files(needed)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], said, sep="|")
"""


@pytest.mark.parametrize(
    ("soft", "hard", "needed", "after", "told"),
    [(256, 2000, 1500, 1500, []), (1000, 2000, 500, 1000, []), (256, 600, 1500, 600, ["1,500", "600", "data.workers"])],
)
def test_the_soft_limit_is_raised_as_far_as_needed_and_allowed(
    soft: int, hard: int, needed: int, after: int, told: list[str]
):
    command = [sys.executable, "-c", CHILD, *map(str, (soft, hard, needed))]
    limit, said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("|")
    assert int(limit) == after and bool(said.strip()) == bool(told)
    assert all(each in said for each in told)


def test_readers_and_peers_are_counted():
    assert needed_open_files(world_size=1, reading_threads=0) < 1024
    assert needed_open_files(world_size=1024, reading_threads=0) > 2 * 1024
    assert needed_open_files(world_size=8, reading_threads=16) > 16 * 256

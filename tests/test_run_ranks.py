"""`run_ranks`: when a rank fails, the others, which may wait for it for ever, are ended."""

import math
from pathlib import Path

import pytest

from tests.workers import run_ranks

WORKER = """
import sys, time
if sys.argv[2] == "1":
    sys.exit("I am rank 1")
time.sleep(10**6)
"""


def test_a_failing_rank_is_told_and_the_others_are_not_waited_for(tmp_path: Path):
    (tmp_path / "worker.py").write_text(WORKER, encoding="utf-8")
    with pytest.raises(AssertionError, match="rank 1 ended with 1:\nI am rank 1"):
        run_ranks(tmp_path / "worker.py", tmp_path, world_size=3, limit_seconds=math.inf)

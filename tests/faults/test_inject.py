"""The faults of this suite strike where they say: in one run, every point is passed."""

import json
import os
import subprocess
import sys

import pytest

from tests.faults.conftest import NewCase
from tests.faults.harness import INJECT, ROOT, Case

# By the process that comes by.
OF_ALL_RANKS = ("between_steps", "forward", "backward", "optimizer", "evaluation", "batch")
OF_ALL_RANKS_SAVING = ("save.begin", "save.snapshot", "save.writing", "save.written")
OF_RANK_0 = (
    *("save.manifest", "save.before_rename", "save.after_rename", "save.pruning"),
    *("model.writing", "model.before_rename", "model.after_rename", "metrics.writing", "record.writing"),
)


def struck(faults: list[dict[str, object]]) -> list[str]:
    return [f"{fault['point']} of rank {fault['rank']}" for fault in faults if os.path.exists(str(fault["once"]))]


def test_every_point_of_a_stage_is_passed(case: Case) -> None:
    """The action is a sleep of no time."""
    faults = [
        *(case.fault("sleep", point, rank=rank, step=24) for point in OF_ALL_RANKS for rank in (0, 1)),
        *(case.fault("sleep", point, rank=rank, step=20) for point in OF_ALL_RANKS_SAVING for rank in (0, 1)),
        *(case.fault("sleep", point, rank=0) for point in OF_RANK_0),
    ]
    ended = case.start(faults=faults).wait()
    assert ended.code == 0, ended.output
    assert struck(faults) == [f"{fault['point']} of rank {fault['rank']}" for fault in faults]


def test_a_fault_waits_for_its_step_and_its_trigger_and_strikes_as_often_as_it_may(tmp_path) -> None:
    marker, trigger = tmp_path / "marker", tmp_path / "trigger"
    faults = [
        {"action": "enospc", "point": "metrics.writing", "nth": 2, "once": str(marker)},
        {"action": "raise", "point": "metrics.writing", "trigger": str(trigger)},
    ]
    code = f"""
from pathlib import Path
file = open({str(tmp_path / "metrics.jsonl")!r}, "ab", buffering=0)
said = []
for number in range(5):
    if number == 3:
        Path({str(trigger)!r}).touch()
    try:
        said.append(file.write(b"1234"))
    except (OSError, RuntimeError) as error:
        said.append(type(error).__name__)
print(said)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{INJECT}:{ROOT}", "SHARDVIT_FAULT": json.dumps(faults)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.stdout.strip() == "[4, 'OSError', 4, 'RuntimeError', 4]", done.stdout + done.stderr
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"1234" + b"12" + b"1234" + b"12" + b"1234"
    assert marker.exists() and not trigger.exists()


@pytest.mark.fast
def test_a_point_that_there_is_not_is_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ""],
        env={**os.environ, "PYTHONPATH": str(INJECT), "SHARDVIT_FAULT": '[{"action": "kill", "point": "nowhere"}]'},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert "SHARDVIT_FAULT names points that there are not: nowhere" in done.stderr


def test_nan_reaches_the_gradient_and_only_in_its_steps(new_case: NewCase) -> None:
    case = new_case(changes={"stages.pretrain.duration": "8 steps", "stages.pretrain.log_every": "1 steps"})
    fault = case.fault("nan", "backward", rank=1, step=3, last_step=4, once=None)
    ended = case.start(faults=[fault]).wait()
    assert ended.code == 0, ended.output
    skipped = [metrics["opt/skipped_steps"] for _, metrics in case.curve() if "opt/skipped_steps" in metrics]
    assert skipped == [0, 0, 0, 1, 2, 2, 2, 2]

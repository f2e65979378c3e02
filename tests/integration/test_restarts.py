"""`shardvit run --max-restarts`: a real rank is killed, and the run comes to its end by itself."""

from __future__ import annotations

from pathlib import Path

from data_shards.packing.pack import pack
from tests.faults.harness import STEPS, Case


def test_a_run_whose_rank_is_killed_comes_to_its_end_by_itself(tmp_path: Path):
    shards = tmp_path / "digits"
    pack("digits", shards, classes=("0", "1", "2"), holdout=0.2, samples_per_shard=100, report=lambda text: None)
    case = Case(tmp_path / "case", shards)
    killed = case.fault("kill", "backward", rank=1, step=12)
    ended = case.start("--max-restarts", "3", how="run", faults=[killed]).wait()
    assert ended.code == 0, ended.output
    assert "restart 1 of 3 from step 10" in ended.output and "restart 2" not in ended.output
    assert "a process was killed by signal 9" in ended.output and "Traceback" not in ended.output
    assert case.record()["state"] == "done" and case.record()["last_saved_step"] == STEPS
    assert not list(case.run.glob(".rendezvous*"))

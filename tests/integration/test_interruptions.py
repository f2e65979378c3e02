"""A killed run ends as an undisturbed one: by the same command again, or by itself. All ways are in tests/faults.

Real processes: `shardvit run`, two ranks on gloo.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from data_shards.packing.pack import pack
from tests.faults.harness import STEPS, Case

CHANGES = {
    "engine.saving": "background",
    "stages.pretrain.stochastic_depth": 0.1,
    "stages.pretrain.patch_dropout": 0.5,
    "stages.pretrain.unmasked_finish": "20%",
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "digits"
    pack("digits", out, classes=("0", "1", "2"), holdout=0.2, samples_per_shard=100, report=lambda text: None)
    return out


def test_a_run_goes_on_after_a_power_failure_as_if_nothing_had_happened(
    tmp_path: Path, shards: Path, preloaded_environment: Mapping[str, str]
):
    """What nobody kills is forked."""
    undisturbed, case = (Case(tmp_path / name, shards, changes=CHANGES) for name in ("undisturbed", "case"))
    ended = undisturbed.start(how="run", environment=preloaded_environment).wait()
    assert ended.code == 0, ended.output
    killed = case.start(how="run", faults=[case.fault("kill_all", "between_steps", rank=1, step=45)]).wait()
    # A save waits for the one before it, so step 40's began after step 30's was complete.
    assert killed.code == -signal.SIGKILL and case.saved()[-1] in (30, 40), killed.output
    case.wait_until_all_have_ended()
    resumed = case.start(how="run", environment=preloaded_environment).wait()
    assert resumed.code == 0 and "going on from" in resumed.output, resumed.output
    assert case.curve() == undisturbed.curve()
    for key in ("model_digest", "results"):
        assert case.record()[key] == undisturbed.record()[key]


def test_with_max_restarts_a_run_whose_rank_is_killed_comes_to_its_end_by_itself(tmp_path: Path, shards: Path):
    case = Case(tmp_path / "case", shards)
    killed = case.fault("kill", "backward", rank=1, step=12)
    ended = case.start("--max-restarts", "3", how="run", faults=[killed]).wait()
    assert ended.code == 0, ended.output
    assert "restart 1 of 3 from step 10" in ended.output and "restart 2" not in ended.output
    assert "a process was killed by signal 9" in ended.output and "Traceback" not in ended.output
    assert case.record()["state"] == "done" and case.record()["last_saved_step"] == STEPS
    assert not list(case.run.glob(".rendezvous*"))


def test_a_reader_that_leaves_after_three_lines_ends_nothing(tmp_path: Path, shards: Path):
    """`shardvit run ... 2>&1 | head -3`, through the supervisor and the launcher."""
    case = Case(tmp_path / "case", shards)
    ended = case.start(how="run", shell="2>&1 | head -3; exit ${PIPESTATUS[0]}").wait()
    assert ended.code == 0 and len(ended.output.splitlines()) == 3
    assert case.record()["state"] == "done" and case.curve()[-1][0] == STEPS

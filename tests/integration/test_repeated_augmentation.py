"""Runs with repeated augmentation: a kill and a resume change nothing, another number of processes only rounding."""

import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.faults.harness import Case, pack_shards

CHANGES = {
    "engine.precision": "fp32",
    "stages.pretrain.duration": "40 steps",
    "stages.pretrain.global_batch_size": 32,  # not a multiple of the repeats, as DeiT's 1024
    "stages.pretrain.augment.repeats": 3,
    "stages.pretrain.log_every": "1 steps",
    "stages.pretrain.save_every": "15 steps",
    "stages.pretrain.stochastic_depth": 0.1,
}
KILLED_AT = 26


@pytest.mark.slow
def test_a_killed_run_ends_as_an_undisturbed_one_and_on_two_processes_as_on_one(
    tmp_path: Path, preloaded_environment: Mapping[str, str]
):
    shards = pack_shards(tmp_path / "digits")
    cases = {
        name: Case(tmp_path / name, shards, changes=CHANGES | {"processes": processes})
        for name, processes in (("undisturbed", 2), ("killed", 2), ("alone", 1))
    }
    for name in ("undisturbed", "alone"):
        ended = cases[name].start(how="run", environment=preloaded_environment).wait()
        assert ended.code == 0, ended.output
    killed = cases["killed"]
    faults = [killed.fault("kill_all", "between_steps", rank=1, step=KILLED_AT)]
    ended = killed.start(how="run", faults=faults).wait()
    assert ended.code == -signal.SIGKILL and killed.saved()[-1] == 15, ended.output
    continued = killed.start(how="run", environment=preloaded_environment).wait()
    assert continued.code == 0 and "resuming from" in continued.output, continued.output
    assert "each image 3 times in a batch" in continued.output
    curve = cases["undisturbed"].curve()
    assert killed.curve() == curve
    assert killed.record()["model_digest"] == cases["undisturbed"].record()["model_digest"]
    alone = cases["alone"].curve()
    assert [step for step, _ in alone] == [step for step, _ in curve]
    for (_, ours), (_, theirs) in zip(alone, curve, strict=True):
        for metric in ours.keys() & {"train/loss", "val/loss"}:
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4), metric

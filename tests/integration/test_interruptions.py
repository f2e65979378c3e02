"""A run that loses power continues by the same command and ends as an undisturbed one: `shardvit run`, two real ranks.

Other interruptions are rows of tests/faults, and `python -m tests.faults.soak` has them one after another.
"""

import signal
from collections.abc import Mapping
from pathlib import Path

from tests.faults.harness import Case, pack_shards

CHANGES = {
    "model.depth": 2,
    "engine.saving": "background",
    "stages.pretrain.duration": "50 steps",
    "stages.pretrain.save_every": "20 steps",
    "stages.pretrain.stochastic_depth": 0.1,
    "stages.pretrain.patch_dropout": 0.5,
    "stages.pretrain.unmasked_finish": "20%",
}


def test_a_run_goes_on_after_a_power_failure_as_if_nothing_had_happened(
    tmp_path: Path, preloaded_environment: Mapping[str, str]
):
    """What nobody kills is forked."""
    shards = pack_shards(tmp_path / "digits")
    undisturbed, case = (Case(tmp_path / name, shards, changes=CHANGES) for name in ("undisturbed", "case"))
    ended = undisturbed.start(how="run", environment=preloaded_environment).wait()
    assert ended.code == 0, ended.output
    ended = case.start(how="run", faults=[case.fault("kill_all", "between_steps", rank=1, step=45)]).wait()
    # A save waits for the one before it, so step 40's began after step 20's was complete; its own files are written
    # beside the steps, and the kill may come before they are all there.
    assert ended.code == -signal.SIGKILL and case.saved()[-1] in (20, 40), ended.output
    continued = case.start(how="run", environment=preloaded_environment).wait()
    assert continued.code == 0 and "resuming from" in continued.output, continued.output
    assert case.curve() == undisturbed.curve()
    assert case.record()["model_digest"] == undisturbed.record()["model_digest"]
    assert case.record()["results"] == undisturbed.record()["results"]

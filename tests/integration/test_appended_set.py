"""A run whose set is appended to while it is down goes on as if nothing had happened; a new one takes all images.

Two real ranks under `shardvit run`.
"""

import json
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.shards.manifest import read_manifest
from tests.faults.harness import Case, pack_shards


@pytest.mark.slow
def test_a_run_goes_on_with_the_set_that_it_began_with(tmp_path: Path, preloaded_environment: Mapping[str, str]):
    undisturbed = Case(tmp_path / "undisturbed", pack_shards(tmp_path / "digits"))
    assert undisturbed.start(how="run", environment=preloaded_environment).wait().code == 0
    case = Case(tmp_path / "case", shards := pack_shards(tmp_path / "living"))
    ended = case.start(how="run", faults=[case.fault("kill_all", "between_steps", rank=1, step=45)]).wait()
    assert ended.code == -signal.SIGKILL, ended.output
    before = read_manifest(shards / "train")
    pack("digits", shards, classes=("0", "1", "2"), holdout=0.5, seed=1, existing="append", report=lambda text: None)
    assert read_manifest(shards / "train").num_samples > before.num_samples
    continued = case.start(how="run", environment=preloaded_environment).wait()
    assert continued.code == 0 and "resuming from" in continued.output, continued.output
    assert continued.output.count(f"manifest-{before.digest}.json") == 1, continued.output
    assert case.curve() == undisturbed.curve()
    assert case.record()["model_digest"] == undisturbed.record()["model_digest"]
    assert case.record()["results"] == undisturbed.record()["results"]
    fresh = Case(tmp_path / "fresh", shards)
    assert fresh.start(how="run", environment=preloaded_environment).wait().code == 0
    data = json.loads((fresh.run / "pretrain" / "data.json").read_text())
    assert read_manifest(shards / "train").digest in data["manifests"].values()

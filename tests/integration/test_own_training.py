"""Own loss, augmentation, metrics, callback, task and optimizer in `shardvit run`: exact as those that are built in."""

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import Case, pack_shards
from tests.own_training import write_example

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_shards(tmp_path_factory.mktemp("own") / "digits")


def own(mine: str, **keys: Any) -> dict[str, object]:
    """The suite's recipe with own code."""
    return {
        "stages.pretrain.loss": {"custom": f"{mine}:focal"},
        "stages.pretrain.augment.custom": f"{mine}:noise",
        "stages.pretrain.metrics": [f"{mine}:hits", f"{mine}:PerClass"],
        "stages.pretrain.callbacks": [f"{mine}:Total"],
        "stages.pretrain.keep_best": "hits",
        "stages.pretrain.duration": "40 steps",
        **keys,
    }


ROTATIONS = {"stages.pretrain.augment.mixup_alpha": 0.0, "stages.pretrain.loss": "softmax"}


@pytest.mark.parametrize(
    ("processes", "zero_stage", "does"),
    [
        (2, 1, "classes"),
        *(pytest.param(*each, marks=SLOW) for each in [(1, 1, "classes"), (1, 2, "classes"), (2, 2, "classes")]),
        *(pytest.param(*each, marks=SLOW) for each in [(2, 0, "optimizer"), (2, 2, "task")]),
        (1, 1, "model"),
        *(pytest.param(*each, marks=SLOW) for each in [(1, 2, "model"), (2, 1, "model"), (2, 2, "model")]),
    ],
)
def test_a_run_that_is_killed_goes_on_as_if_nothing_had_happened(
    shards: Path, tmp_path: Path, preloaded_environment: Mapping[str, str], processes: int, zero_stage: int, does: str
):
    mine = write_example(tmp_path)
    changes = own(mine, processes=processes, **{"engine.zero_stage": zero_stage})
    if does == "task":
        changes |= {**ROTATIONS, "stages.pretrain.task": f"{mine}:Rotations"}
    if does == "optimizer":
        changes["stages.pretrain.optimizer"] = {"custom": f"{mine}:nadam", "lr": 0.003, "weight_decay": 0.05}
    if does == "model":
        changes["model"] = {"custom": f"{mine}:build", "width": 16}
        changes |= {"stages.pretrain.dropout": 0.0, "stages.pretrain.stochastic_depth": 0.0}
    undisturbed, case = (Case(tmp_path / name, shards, changes=changes) for name in ("undisturbed", "case"))
    ended = undisturbed.start(how="run", environment=preloaded_environment).wait()
    assert ended.code == 0, ended.output
    faults = [case.fault("kill_all", "between_steps", rank=processes - 1, step=25)]
    ended = case.start(how="run", faults=faults).wait()
    assert ended.code == -signal.SIGKILL and case.saved()[-1] == 20, ended.output
    if (processes, zero_stage, does) == (2, 1, "classes"):
        changed = Path(mine).read_text()
        Path(mine).write_text(changed.replace("** 2", "** 3"))
        ended = case.start(how="run", environment=preloaded_environment).wait()
        assert ended.code == 2 and "stages.pretrain.loss.custom: mine.py@" in ended.output, ended.output
        Path(mine).write_text(changed)
    ended = case.start(how="run", environment=preloaded_environment).wait()
    assert ended.code == 0 and "resuming from" in ended.output, ended.output

    assert case.curve() == undisturbed.curve()
    assert case.record()["model_digest"] == undisturbed.record()["model_digest"]
    last = [values for _, values in case.curve() if "val/hits" in values][-1]
    assert last["val/hits"] == last["val/top1"]
    assert last["val/PerClass"] == pytest.approx(last["val/balanced_accuracy"], abs=1e-6)
    assert any(values.get("mine/total", 0.0) > 0 for _, values in case.curve())
    outputs = 4 if does == "task" else 3
    record = json.loads((case.run / "pretrain/model/config.json").read_text())["shardvit"]
    assert record["num_classes"] == len(record["class_names"]) == outputs

"""Few-shot measures while a stage trains change not one bit of it, and resume as if nothing had been."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardvit.data_shards.packing.pack import pack
from shardvit.pipeline.runs.logs import read_metrics
from shardvit.pipeline.runs.run_folder import RunFolder
from tests.small_recipe import small_recipe, small_stage, write_recipe

Run = Callable[..., subprocess.CompletedProcess[str]]


def recipe(name: str, **stage: Any) -> dict[str, Any]:
    keys = small_stage(
        "many",
        global_batch_size=32,
        duration="12 steps",
        dropout=0.2,
        dropout_masks="process",  # drawn from the process's generator
        ema={"decay": 0.5},
        log_every="3 steps",
        eval_every="3 steps",
        save_every="4 steps",
        **stage,
    )
    return small_recipe(name, processes=2, engine={"zero_stage": 3, "precision": "fp32"}, pretrain_=keys)


FEW_SHOT = [
    {"name": "few", "train": "few/train", "eval": "few/val", "shots": [1, 5]},
    {"name": "rare", "train": "few/train", "eval": "few/val", "every": "6 steps", "layer": "pooled"},
]


def test_training_is_the_same_bit_for_bit_with_and_without(tmp_path: Path, run_preloaded: Run) -> None:
    for name, classes in (("many", "01456"), ("few", "238")):
        pack("digits", tmp_path / name, classes=tuple(classes), holdout=0.3, report=lambda line: None)
    for name, stage in (("without", {}), ("with", {"few_shot": FEW_SHOT})):
        write_recipe(tmp_path / f"{name}.yaml", recipe(name, **stage))
        done = run_preloaded("run", f"{name}.yaml", cwd=tmp_path, timeout_seconds=500)
        assert done.returncode == 0, done.stdout + done.stderr
    plain, measured = (RunFolder(tmp_path / "runs", name) for name in ("without", "with"))
    assert plain.record("pretrain").model_digest == measured.record("pretrain").model_digest

    def rows(folder: RunFolder) -> dict[int, dict[str, float]]:
        found: dict[int, dict[str, float]] = {}
        for row in read_metrics(folder.stage("pretrain") / "metrics.jsonl"):
            of_step = {key: value for key, value in row.metrics.items() if not key.startswith("perf/")}
            found[row.step] = found.get(row.step, {}) | of_step
        return found

    few_shot = {
        step: {key: value for key, value in row.items() if "fewshot" in key} for step, row in rows(measured).items()
    }
    without = {
        step: {key: value for key, value in row.items() if "fewshot" not in key} for step, row in rows(measured).items()
    }
    assert without == rows(plain)
    often = {"val/fewshot_few_1shot", "val/fewshot_few_5shot"}
    assert {step: set(row) for step, row in few_shot.items()} == {
        3: often,
        6: often | {"val/fewshot_rare_5shot"},
        9: often,
        12: often | {"val/fewshot_rare_5shot"},
    }
    assert all(0 <= value <= 1 for row in few_shot.values() for value in row.values())
    results = measured.record("pretrain").results
    assert few_shot[12].items() <= results.items()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train": "nowhere"}, "nowhere"),
        ({"eval": "many/val"}, "few_shot.0"),
        ({"every": "1 steps"}, "few_shot.0.every"),
    ],
)
def test_mistakes_are_said_before_anything_starts(
    tmp_path: Path, run_preloaded: Run, change: dict[str, str], words: str
) -> None:
    for name, classes in (("many", "01"), ("few", "238")):
        pack("digits", tmp_path / name, classes=tuple(classes), holdout=0.3, report=lambda line: None)
    write_recipe(tmp_path / "r.yaml", recipe("r", few_shot=[FEW_SHOT[0] | change]))
    done = run_preloaded("run", "r.yaml", cwd=tmp_path, timeout_seconds=500)
    assert done.returncode == 2 and words in done.stderr and "starting" not in done.stdout

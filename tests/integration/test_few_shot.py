"""Few-shot measures while a stage trains change not one bit of it, and resume as if nothing had been."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.runs.run_folder import RunFolder
from tests.integration.small_runs import curve, pack_digits, stage, write_recipe

Run = Callable[..., subprocess.CompletedProcess[str]]


def write(folder: Path, name: str, **keys: Any) -> None:
    """A recipe of two processes at ZeRO 3."""
    pretrain = stage(
        "many",
        "12 steps",
        global_batch_size=32,
        dropout=0.2,
        dropout_masks="process",  # drawn from the process's generator
        ema={"decay": 0.5},
        log_every="3 steps",
        eval_every="3 steps",
        save_every="4 steps",
        **keys,
    )
    engine = {"zero_stage": 3, "precision": "fp32"}
    write_recipe(folder, {"pretrain": pretrain}, name=name, file=f"{name}.yaml", processes=2, engine=engine)


FEW_SHOT = [
    {"name": "few", "train": "few/train", "eval": "few/val", "shots": [1, 5]},
    {"name": "rare", "train": "few/train", "eval": "few/val", "every": "6 steps", "layer": "pooled"},
]


def test_training_is_the_same_bit_for_bit_with_and_without(tmp_path: Path, run_preloaded: Run) -> None:
    for name, classes in (("many", "01456"), ("few", "238")):
        pack_digits(tmp_path / name, classes, holdout=0.3)
    for name, keys in (("without", {}), ("with", {"few_shot": FEW_SHOT})):
        write(tmp_path, name, **keys)
        done = run_preloaded("run", f"{name}.yaml", cwd=tmp_path, timeout_seconds=500)
        assert done.returncode == 0, done.stdout + done.stderr
    plain, measured = (RunFolder(tmp_path / "runs", name) for name in ("without", "with"))
    assert plain.record("pretrain").model_digest == measured.record("pretrain").model_digest

    def rows(folder: RunFolder) -> dict[int, dict[str, float]]:
        found: dict[int, dict[str, float]] = {}
        for step, metrics in curve(folder.stage("pretrain")):
            found[step] = found.get(step, {}) | metrics
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
        pack_digits(tmp_path / name, classes, holdout=0.3)
    write(tmp_path, "r", few_shot=[FEW_SHOT[0] | change])
    done = run_preloaded("run", "r.yaml", cwd=tmp_path, timeout_seconds=500)
    assert done.returncode == 2 and words in done.stderr and "starting" not in done.stdout

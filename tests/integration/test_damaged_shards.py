"""Damaged shards in a real run: trained to the end with every offender listed, or stopped at the first one."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.shards.tar_index import open_index
from shardvit.pipeline.runs.logs import read_metrics
from tests.small_recipe import SMALL, small_recipe, small_stage, write_recipe

Damaged = tuple[Path, set[tuple[str, str]]]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    """Digits in 8 shards: about 1 % of the images spoiled, one tar cut short; and what is lost by that."""
    folder = tmp_path_factory.mktemp("damaged")
    pack("digits", folder / "digits", holdout=0.2, samples_per_shard=180, report=lambda line: None)
    tars = sorted((folder / "digits" / "train").glob("*.tar"))
    lost: set[tuple[str, str]] = set()
    for number, tar in enumerate(tars):
        index = open_index(tar)
        with open(tar, "r+b") as stream:
            for row in (number, 90 + number):
                stream.seek(int(index.image_offset[row]))
                # A header alone: the file's beginning says PNG, its end is missing.
                stream.write(b"\x89PNG\r\n\x1a\n" + bytes(int(index.image_size[row]) - 8))
                lost.add((tar.name, index.keys[row]))
            if number == 5:
                stream.truncate(int(index.image_offset[-20]) + 7)
                lost |= {(tar.name, key) for key in list(index.keys)[-20:]}
    keys = {"global_batch_size": 32, "duration": "1.1 epochs", "log_every": "5 steps"}
    engine, model = {"backend": "accelerate", "precision": "fp32"}, SMALL | {"depth": 2}
    stage = small_stage(folder / "digits", start="scratch", **keys)
    write_recipe(
        folder / "recipe.yaml", small_recipe("damaged", model=model, processes=2, engine=engine, finetune_=stage)
    )
    return folder, lost


@pytest.fixture(scope="module")
def run(run_preloaded: Callable[..., subprocess.CompletedProcess[str]]) -> Run:
    return lambda folder, *overrides: run_preloaded("run", "recipe.yaml", *overrides, cwd=folder, timeout_seconds=500)


def offenders(stage: Path) -> list[tuple[str, str]]:
    rows = [json.loads(line) for line in (stage / "corrupt_samples.jsonl").read_text().splitlines()]
    assert all(row["set"] == "train" and row["reason"] for row in rows)
    return [(Path(row["shard"]).name, row["key"]) for row in rows]


@pytest.mark.filterwarnings("ignore")
def test_training_ends_and_the_offenders_are_listed_exactly(damaged: Damaged, run: Run):
    folder, lost = damaged
    done = run(folder, "data.max_corrupt_share=0.05", "name=lenient")
    assert done.returncode == 0, done.stdout + done.stderr
    stage = folder / "runs/lenient/finetune"
    assert len(lost) == len(offenders(stage)) and set(offenders(stage)) == lost
    counts = [
        row.metrics["data/substituted_images"]
        for row in read_metrics(stage / "metrics.jsonl")
        if "train/loss" in row.metrics
    ]
    assert counts == sorted(counts) and len(lost) <= counts[-1] <= 2 * len(lost)
    assert "is damaged" in done.stdout + done.stderr

    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/runs/mlflow.db")
    (child,) = client.search_runs(
        [client.get_experiment_by_name("shardvit").experiment_id], "tags.`shardvit.stage` = 'finetune'"
    )
    assert "corrupt_samples.jsonl" in [file.path for file in client.list_artifacts(child.info.run_id)]


def test_more_known_damage_than_allowed_is_refused_before_anything_is_started(damaged: Damaged, run: Run):
    folder, _ = damaged
    done = run(folder, "data.max_corrupt_share=0.01", "name=known")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "-000005.tar" in done.stderr and "20 of 1,438 images count as lost" in done.stderr
    assert not (folder / "runs/known").exists()


@pytest.mark.slow
def test_more_damage_than_allowed_stops_with_everything_saved_and_a_raised_budget_goes_on(damaged: Damaged, run: Run):
    folder, lost = damaged
    done = run(folder, "data.max_corrupt_share=0.016", "name=budget")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "max_corrupt_share 0.016" in done.stderr and "Traceback" not in done.stderr
    stage = folder / "runs/budget/finetune"
    step = json.loads((stage / "stage.json").read_text())["last_saved_step"]
    assert step > 0
    again = run(folder, "data.max_corrupt_share=0.05", "name=budget")
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"step {step}" in again.stdout + again.stderr
    assert set(offenders(stage)) == lost


def test_with_a_budget_of_nothing_the_first_one_is_named_at_once(damaged: Damaged, run: Run):
    folder, lost = damaged
    refused = run(folder, "data.max_corrupt_share=0", "name=strict")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "-000005.tar" in refused.stderr  # cut short: found before anything is started
    assert not (folder / "runs/strict").exists()
    cut = next((folder / "digits" / "train").glob("*-000005.tar"))
    manifest = json.loads((cut.parent / "manifest.json").read_text())
    whole = next(entry["num_bytes"] for entry in manifest["shards"] if entry["file"] == cut.name)
    with open(cut, "r+b") as stream:
        stream.truncate(whole)  # of the right size again, its end all zeros
    stopped = run(folder, "data.max_corrupt_share=0", "name=strict")
    assert stopped.returncode == 2 and "Traceback" not in stopped.stderr
    assert any(repr(key) in stopped.stderr for _, key in lost)

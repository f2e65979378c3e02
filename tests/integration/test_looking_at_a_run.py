"""A real run with pictures on: drawn beside training, sent to MLflow, on the report; and training is the same."""

import json
import re
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shardvit.data_shards.packing.pack import pack
from shardvit.pipeline.runs.pictures import kept_pictures
from tests.left_behind import surprises
from tests.small_recipe import SMALL, small_recipe, small_stage, write_recipe

Run = Callable[..., subprocess.CompletedProcess[str]]
SYNCS = (("sync", "runs/drawn"), ("sync", "runs/plain"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_cli: Run) -> Path:
    """Two runs of one recipe, with pictures and without."""
    folder = tmp_path_factory.mktemp("looking")
    pack("digits", folder / "shards", classes=("0", "1", "2"), holdout=0.2, report=lambda text: None)
    stage = small_stage(duration="8 steps", log_every="4 steps", eval_every="50%")
    recipe = small_recipe("drawn", model=SMALL | {"depth": 2}, processes=1, pretrain_=stage)
    write_recipe(folder / "recipe.yaml", recipe)
    for overrides in ([], ["name=plain", "pictures=off", "seed=0"]):
        done = run_cli("run", "recipe.yaml", *overrides, cwd=folder, env={"SHARDVIT_PICTURES": "auto"})
        assert done.returncode == 0, done.stdout + done.stderr
    for command in (("report", "runs/drawn"), ("report", "--no-draw", "runs/plain"), *SYNCS):  # what no run waits for
        done = run_cli(*command, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def store(folder: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(folder / "runs/mlflow.db")) as connection:
        yield connection


def run_id(folder: Path, run: str) -> str:
    return json.loads((folder / f"runs/{run}/mlflow.json").read_text())["run_id"]


def test_nothing_is_left_that_is_not_known(folder: Path) -> None:
    assert surprises(folder / "runs/drawn") == surprises(folder / "runs/plain") == []


def test_each_moment_of_a_stage_is_drawn(folder: Path) -> None:
    stage = folder / "runs/drawn/pretrain"
    assert json.loads((stage / "pictures/drawn.json").read_text()) == {"begin": 0, "evaluated": 8, "end": 8}
    steps = {kept.picture.name: kept.step for kept in kept_pictures(stage)}
    assert steps["training_batch"] == 0
    assert {"evaluation_grid", "confusion_matrix", "reliability", "per_class", "attention_rollout"} <= steps.keys()
    assert not (folder / "runs/plain/pretrain/pictures").exists()


def test_mlflow_has_the_pictures_and_the_model_of_both(folder: Path, store: sqlite3.Connection) -> None:
    artifacts = folder / "runs/mlartifacts" / run_id(folder, "drawn/pretrain") / "artifacts"
    assert {"confusion_matrix.svg", "attention_rollout.svg"} <= {
        path.name for path in (artifacts / "figures").iterdir()
    }
    assert list((artifacts / "images").glob("*.png"))
    models = {source for (source,) in store.execute("SELECT source_run_id FROM logged_models")}
    assert models == {run_id(folder, f"{run}/pretrain") for run in ("drawn", "plain")}


def test_mlflow_has_the_page_of_both(folder: Path) -> None:
    for run in ("drawn", "plain"):
        page = folder / "runs/mlartifacts" / run_id(folder, run) / "artifacts/report.html"
        assert ("data:image/" in page.read_text(encoding="utf-8")) == (run == "drawn")
        assert f"<h1>{run}</h1>" in page.read_text(encoding="utf-8")


def test_training_is_the_same_to_the_last_bit(folder: Path) -> None:
    drawn, plain = (folder / f"runs/{name}/pretrain/model/model.safetensors" for name in ("drawn", "plain"))
    assert drawn.read_bytes() == plain.read_bytes()


def test_the_report_has_them_and_what_was_changed_of_the_recipe(folder: Path, run_cli: Run) -> None:
    difference = (folder / "runs/plain/recipe_difference.txt").read_text()
    assert difference.splitlines()[0] == "parent: recipe.yaml" and "name: drawn -> plain" in difference
    assert not (folder / "runs/drawn/recipe_difference.txt").exists()
    for name, parts in (("drawn", ["data:image/"]), ("plain", ["data:image/", "name: drawn -&gt; plain"])):
        made = run_cli("report", f"runs/{name}", cwd=folder)
        assert made.returncode == 0, made.stderr
        html = (folder / f"runs/{name}/report.html").read_text(encoding="utf-8")
        assert all(part in html for part in parts)
        assert not re.search(r'(?:src|href)="https?:', html)
    assert (folder / "runs/plain/pretrain/pictures/drawn.json").exists()  # what was missing

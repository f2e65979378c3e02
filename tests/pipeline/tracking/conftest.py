"""One MLflow store on SQLite for a module, since MLflow makes its schema in some seconds, and a run's settings."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.tracking import sender
from shardvit.pipeline.tracking.facts import DatasetInput
from tests.pipeline.tracking.attempts import OPENED, Settings


@pytest.fixture(scope="module")
def runs_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def client(runs_root: Path) -> Any:
    from mlflow.tracking import MlflowClient

    # With patience: where a commit's fsync takes longer than SQLite's 5 seconds, what reads meanwhile is refused.
    opened = MlflowClient(tracking_uri=f"sqlite:///{runs_root}/mlflow.db?timeout=240")
    opened.search_experiments()
    return opened


@pytest.fixture
def settings(runs_root: Path, client: Any, request: pytest.FixtureRequest) -> Settings:
    name = "".join(letter if letter.isalnum() else "_" for letter in request.node.name)
    recipe = load_recipe("digits", overrides=[f"name={name}", "stages.pretrain.head_bias=-7"])
    folder = RunFolder(runs_root=runs_root, name=recipe.name)
    folder.path.mkdir()
    (folder.path / "recipe.yaml").write_text("seed: 1\n")
    return Settings(
        folder=folder,
        recipe=recipe,
        params={"plan.lanes": "4", "data.url": "https://me:secret@host/x", "long": "x" * 7000, "empty": ""},
        datasets=(
            DatasetInput(name="digits-train", source="shards/train", digest="d" * 36, context="train", images=9),
            DatasetInput(name="digits-val", source="shards/test", digest="e" * 40, context="eval"),
        ),
        tags={"shardvit.world_size": "2", "shardvit.host": "node1"},
    )


@pytest.fixture
def close_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sender, "_BEGIN_SECONDS", 0.0)
    monkeypatch.setattr(sender, "_FLUSH_SECONDS", 0.05)
    monkeypatch.setattr(sender, "_FIRST_PAUSE_SECONDS", 0.05)
    yield
    while OPENED:
        OPENED.pop().file.close()

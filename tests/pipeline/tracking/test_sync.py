"""A real MLflow server on loopback: away from the start, or in the middle; after a sync it has every value once."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import torch

from shardvit.data_shards.errors import UserError
from shardvit.model.saved.model_folder import SavedModelMeta, load_model, save_model
from shardvit.model.vit import build_model
from shardvit.pipeline.pictures.style import keep_picture, new_figure
from shardvit.pipeline.recipe.io import dump_recipe, load_recipe
from shardvit.pipeline.runs.logs import read_metrics
from shardvit.pipeline.runs.pictures import Picture, keep_table
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.tracking import sender
from shardvit.pipeline.tracking.facts import load_run_state
from shardvit.pipeline.tracking.sender import Synced
from tests.pipeline.tracking.attempts import Attempt, Settings, sync

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
_PATIENCE_SECONDS = 240.0


class Server:
    """`mlflow server` on a database in `home`."""

    def __init__(self, home: Path) -> None:
        self.home = home
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.uri = f"http://127.0.0.1:{free.getsockname()[1]}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        arguments = ["--backend-store-uri", f"sqlite:///{self.home}/mlflow.db", "--workers", "1"]
        place = ["--host", "127.0.0.1", "--port", self.uri.rpartition(":")[2]]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *arguments, *place, "--artifacts-destination", str(self.home)],
            env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        end = time.monotonic() + _PATIENCE_SECONDS
        while True:
            with suppress(OSError), urlopen(f"{self.uri}/health", timeout=5):
                return
            assert time.monotonic() < end and self._process.poll() is None
            time.sleep(0.1)

    def stop(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def rows(self, run_id: str) -> list[tuple[str, int, float]]:
        """Every metric row of a run in the database itself."""
        with sqlite3.connect(self.home / "mlflow.db") as database:
            found = database.execute("select key, step, value from metrics where run_uuid = ?", (run_id,)).fetchall()
        database.close()
        return sorted(found)


@contextmanager
def client_of(uri: str) -> Iterator[Any]:
    from mlflow.tracking import MlflowClient

    yield MlflowClient(tracking_uri=uri)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(sender, "_BEGIN_SECONDS", 0.0)
    monkeypatch.setattr(sender, "_LONGEST_PAUSE_SECONDS", 1.0)
    (tmp_path / "server").mkdir()
    one = Server(tmp_path / "server")
    yield one
    one.stop()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A recipe of one stage, in its folder."""
    folder = RunFolder(runs_root=tmp_path / "runs", name="law")
    folder.path.mkdir(parents=True)
    overrides = ["name=law", "stages.swap_head=null", "stages.finetune=null", "tracking.register_as=law-digits"]
    recipe = load_recipe("digits", overrides=[*overrides, "tracking.alias=champion"])
    (folder.path / "recipe.yaml").write_text(dump_recipe(recipe))
    return folder


def settings_of(folder: RunFolder, server: Server) -> Settings:
    from shardvit.pipeline.recipe.io import parse_recipe

    return Settings(
        folder=folder,
        recipe=parse_recipe(folder.path / "recipe.yaml"),
        params={"plan.lanes": "4"},
        uri=server.uri,
    )


def leave_a_result(folder: RunFolder, settings: Settings) -> None:
    """What a stage leaves: two steps of a picture, a table, and a model."""
    stage = folder.stage("pretrain")
    picture = Picture("loss", title="Loss", caption="nats", alt="a curve", group="evaluation")
    for step in (1, 2):
        figure, axes = new_figure(width=2.0, height=1.0)
        axes[0, 0].plot([0, step])
        keep_picture(stage, picture, figure=figure, step=step)
    table = Picture("per_class", title="Classes", caption="share", alt="a table", group="evaluation")
    keep_table(stage, table, columns={"class": ["<b>", "two"], "top1": [0.5, 1.0]}, step=2)
    meta = SavedModelMeta(
        model=settings.recipe.model,
        image_size=16,
        num_classes=3,
        class_names=("a", "b", "<c>"),
        head="linear",
        mean=(0.4, 0.5, 0.6),
        std=(0.2, 0.3, 0.4),
    )
    torch.manual_seed(0)
    state = build_model(meta.model, image_size=16, num_classes=3, head="linear").state_dict()
    state["head.weight"] = torch.randn(3, meta.model.num_features)
    save_model(folder.model("pretrain"), state, meta=meta)
    folder.update("pretrain", state="done", results={"val/top1": 0.75}, model_digest="d1", total_steps=3)


def expected(folder: RunFolder) -> list[tuple[str, int, float]]:
    return sorted(
        (name, row.step, value)
        for row in read_metrics(folder.stage("pretrain") / "metrics.jsonl")
        for name, value in {**row.metrics, "images_seen": float(row.images_seen)}.items()
    )


def until(true: Any) -> None:
    end = time.monotonic() + _PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_after_an_outage_in_mid_run_a_sync_leaves_every_value_once_and_the_model_loads_without_our_code(
    server: Server, run: RunFolder, tmp_path: Path
) -> None:
    settings = settings_of(run, server)
    server.start()
    said: list[str] = []
    attempt = Attempt(settings, resume_step=-1)
    attempt.file.append(step=1, images_seen=64, metrics={"train/loss": 1.0})
    state_file = run.stage("pretrain") / "mlflow.json"
    until(lambda: load_run_state(state_file).sent_rows == 1)
    server.stop()
    attempt.file.append(step=2, images_seen=128, metrics={"train/loss": 0.5, "val/top1": 0.75})
    until(lambda: attempt.said)
    attempt.file.append(step=3, images_seen=192, metrics={"train/loss": 0.25})
    leave_a_result(run, settings)
    (run.path / "report.html").write_text("<p>first")
    assert attempt.close("FINISHED").startswith("3 points and ")
    attempt.file.close()
    with pytest.raises(UserError, match="does not take"):
        sync(settings, said.append)
    server.start()
    (first,) = sync(settings, said.append)
    (second,) = sync(settings, said.append)
    assert first.points == 5 and (first.pictures, first.tables, bool(first.model)) == (2, 1, True)
    assert second == Synced("pretrain")

    child, parent = (load_run_state(file).run_id for file in (state_file, run.path / "mlflow.json"))
    assert child and parent and server.rows(child) == expected(run)
    assert server.rows(parent) == [("pretrain/val/top1", 0, 0.75), ("val/top1", 0, 0.75)]
    with client_of(server.uri) as client:
        runs = client.search_runs([each.experiment_id for each in client.search_experiments()])
        assert {one.info.run_id: one.info.status for one in runs} == {child: "FINISHED", parent: "FINISHED"}
        images = [file.path for file in client.list_artifacts(child, "images") if file.path.endswith(".png")]
        assert sorted(path.partition("+step+")[2].partition("+")[0] for path in images) == ["1", "2"]
        assert [file.path for file in client.list_artifacts(child, "figures")] == ["figures/loss.svg"]
        page = [file.path for file in client.list_artifacts(parent) if file.path == "report.html"]
        assert page and "the page" in first.others
        # The note of what was sent is lost: what is there is found, and stays once.
        state = load_run_state(state_file)
        state.sent = {"model": "d1"}
        state.save()
        sync(settings, said.append)
        again = [file.path for file in client.list_artifacts(child, "images") if file.path.endswith(".png")]
        assert sorted(again) == sorted(images)
        version = client.get_model_version_by_alias("law-digits", "champion")
        model_ids = {one.model_id for one in client.get_run(parent).outputs.model_outputs}
    check_model(server.uri, model_id=next(iter(model_ids)), version=version.version, folder=run, work=tmp_path)


LOAD = """
import json, sys
import mlflow, numpy as np, torch
mlflow.set_tracking_uri(sys.argv[1])
pixels = np.load(sys.argv[3])
model = mlflow.pyfunc.load_model(f"models:/{sys.argv[2]}")
answers = [model.predict(pixels[:count]).tolist() for count in (1, 5)]
answers.append(mlflow.pytorch.load_model("models:/law-digits@champion")(torch.from_numpy(pixels)).tolist())
ours = ("model", "pipeline", "data_shards", "launch", "timm")
assert not [name for name in sys.modules if name.split(".")[0] in ours]
print(json.dumps([answers, model.metadata.metadata["class_names"], model.metadata.signature.inputs.to_dict()]))
"""


def check_model(uri: str, *, model_id: str, version: str, folder: RunFolder, work: Path) -> None:
    """In a process and a folder that know nothing of us: the same probabilities as ours, for any number of images."""
    from shardvit.model.saved.model_folder import build_described

    assert version == "1"
    pixels = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
    np.save(work / "pixels.npy", pixels)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, uri, model_id, str(work / "pixels.npy")],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers, names, signature = json.loads(done.stdout.splitlines()[-1])
    assert names == ["a", "b", "<c>"]
    assert signature[0]["tensor-spec"] == {"dtype": "uint8", "shape": [-1, 16, 16, 3]}
    meta, state = load_model(folder.model("pretrain"))
    model = build_described(meta).eval()
    model.load_state_dict(state)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).double() / 255
    mean, std = (torch.tensor(each, dtype=torch.float64).view(3, 1, 1) for each in (meta.mean, meta.std))
    with torch.no_grad():
        ours = model(((images - mean) / std).float()).softmax(dim=1).numpy()
    for answer in answers:
        np.testing.assert_allclose(np.array(answer), ours[: len(answer)], atol=1e-5)

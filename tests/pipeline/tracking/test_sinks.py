"""TensorBoard and W&B: their own readers return what metrics.jsonl says, whatever the run went through."""

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.recipe.io import dump_recipe, load_recipe
from shardvit.pipeline.recipe.vocabulary import SinkName
from shardvit.pipeline.runs.logs import read_metrics
from shardvit.pipeline.runs.pictures import Picture, keep_image, keep_table
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.tracking.sinks import choose
from shardvit.pipeline.tracking.sinks.choose import check_sinks, sinks_of
from shardvit.pipeline.tracking.sinks.sink import Sink
from shardvit.pipeline.tracking.sync_run import sync_run
from tests.pipeline.tracking.attempts import Attempt, Settings
from tests.pipeline.tracking.read_back import Curves, curves_of, opened, tensorboard_curves, wandb_curves, wandb_history
from tests.pipeline.tracking.wandb_server import wandb_server

BOTH = pytest.mark.parametrize("name", ["tensorboard", "wandb"])
KEY = "k" * 40
ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.usefixtures("close_files"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # wandb's sockets
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # it keeps the environment that it first saw


@pytest.fixture
def run(tmp_path: Path) -> Settings:
    recipe = load_recipe("digits", overrides=["name=small", "tracking.to=[tensorboard,wandb]", "experiment=mine"])
    folder = RunFolder(tmp_path, "small")
    folder.path.mkdir()
    (folder.path / "recipe.yaml").write_text(dump_recipe(recipe))
    return Settings(folder=folder, recipe=recipe, params={"data.url": "https://me:secret@host/x", "plan.lanes": "4"})


def sink_named(name: SinkName, run: Settings) -> Sink:
    (sink,) = sinks_of(run.folder, run.recipe, names=[name], uri=None, experiment=None)
    return sink


def have(name: SinkName, run: Settings) -> Curves:
    if name == "tensorboard":
        return tensorboard_curves(run.folder.stage(run.stage) / "tensorboard")
    return wandb_curves(wandb_history(run.folder.path / "wandb"))


def wanted(name: SinkName, run: Settings) -> Curves:
    rows = read_metrics(run.folder.stage(run.stage) / "metrics.jsonl")
    return curves_of(rows, dtype=np.float32 if name == "tensorboard" else float)


def state_of(name: SinkName, run: Settings) -> Path:
    return run.folder.stage(run.stage) / f"{name}.json"


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 10), "red").save(file, "PNG")
    return file.getvalue()


def problems(said: list[str]) -> list[str]:
    return [line for line in said if not line.startswith("W&B: offline: `wandb sync ")]


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 240
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@BOTH
@pytest.mark.parametrize("seed", range(3))
def test_a_reader_finds_each_value_once_whatever_the_run_went_through(name: SinkName, run: Settings, seed: int):
    """Attempts with rollbacks; kills between sending and writing it down; and attempts that nobody sent."""
    chance, step = random.Random(seed), 0
    for number in range(4):
        resumed = 0 if number == 0 else chance.randint(0, step)
        before = state_of(name, run).read_bytes() if state_of(name, run).exists() else None
        attempt = Attempt(run, resume_step=resumed, sink=sink_named(name, run), sends=number != 1)
        for step in range(resumed + 1, resumed + chance.randint(2, 6)):
            attempt.metrics(step, {"train/loss": chance.random(), "nan": float("nan")})
            if chance.random() < 0.4:
                attempt.metrics(step, {"val/top1": chance.random()})
        attempt.close("KILLED")
        if before and chance.random() < 0.5:
            state_of(name, run).write_bytes(before)
    attempt = Attempt(run, resume_step=step, sink=sink_named(name, run))
    attempt.metrics(step + 1, {"train/loss": 0.5})
    assert attempt.close("FINISHED") == "" and not problems(attempt.said)
    got, want = have(name, run), wanted(name, run)
    assert str(got.pop("nan")) == str(want.pop("nan")) and got == want


@BOTH
def test_a_killed_process_is_followed_by_one_that_completes_its_curve(name: SinkName, run: Settings):
    code = """
        import os, signal, sys, time
        from pathlib import Path
        from shardvit.pipeline.recipe.io import parse_recipe
        from shardvit.pipeline.runs.run_folder import RunFolder
        from shardvit.pipeline.tracking import sender
        from shardvit.pipeline.tracking.facts import load_run_state
        from tests.pipeline.tracking.attempts import Attempt, Settings
        from tests.pipeline.tracking.test_sinks import sink_named, state_of

        sender._BEGIN_SECONDS = 0
        folder = RunFolder(Path(sys.argv[1]), "small")
        run = Settings(folder=folder, recipe=parse_recipe(folder.path / "recipe.yaml"))
        attempt = Attempt(run, sink=sink_named(sys.argv[2], run))
        attempt.log(*range(1, 300))
        while load_run_state(state_of(sys.argv[2], run)).sent_rows < 200:
            time.sleep(0.001)
        attempt.log(*range(300, 400))
        os.killpg(0, signal.SIGKILL)  # W&B's own process, too
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(run.folder.runs_root), name]
    done = subprocess.run(
        command, cwd=ROOT, start_new_session=True, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    second = Attempt(run, resume_step=250, sink=sink_named(name, run))
    second.log(*range(251, 420))
    assert second.close("FINISHED") == "" and not problems(second.said)
    assert have(name, run) == wanted(name, run)
    ids = {path.name.rpartition("-")[2] for path in (run.folder.path / "wandb").glob("offline-run-*")}
    assert len(ids) == (2 if name == "wandb" else 0)  # the stage's and the pipeline's


@pytest.fixture
def pictured(run: Settings) -> Settings:
    attempt = Attempt(run, sends=False)
    attempt.log(1, 2)
    attempt.metrics(2, {"val/top1": 0.5})
    stage = run.folder.stage(run.stage)
    words = {"title": "What", "caption": "How to read it", "alt": "x", "group": "evaluation"}
    for step in (1, 2):
        keep_image(stage, Picture("confusion", **words), png=png(), svg=b"<svg/>", step=step)
    keep_table(stage, Picture("per_class", **words), columns={"class": ["a|b", "c"], "top1": [0.5, None]}, step=2)
    run.folder.update(run.stage, state="done", results={"val/top1": 0.5})
    attempt.close("FINISHED")
    for path in (run.folder.path, stage):
        (path / "mlflow.json").unlink(missing_ok=True)
    return run


def sync(name: SinkName, run: Settings) -> list[str]:
    said: list[str] = []
    done = sync_run(run.folder, run.recipe, sink_named(name, run), say=said.append)
    return [each.describe() for each in done] + problems(said)


def test_a_run_of_the_past_fills_tensorboard_with_all_that_it_has(pictured: Settings):
    (sent,) = sync("tensorboard", pictured)
    assert "6 points" in sent and "2 pictures" in sent and "1 tables" in sent
    assert have("tensorboard", pictured) == wanted("tensorboard", pictured)
    folder = pictured.folder.stage(pictured.stage) / "tensorboard"
    events = opened(folder)
    assert [each.step for each in events.Images("evaluation/confusion")] == [1, 2]
    assert b"Pre-training" in events.Tensors("description")[0].tensor_proto.string_val[0]
    assert b"a|b" in events.Tensors("evaluation/per_class")[0].tensor_proto.string_val[0].replace(b"\\", b"")
    whole = opened(pictured.folder.path / "tensorboard")
    assert [each.value for each in whole.Scalars("pretrain/val/top1")] == [0.5]
    assert {"_hparams_/session_start_info"} <= set(whole.Tags()["tensors"]) | set(whole.PluginTagToContent("hparams"))
    files = sorted(folder.iterdir())
    assert sync("tensorboard", pictured) == ["pretrain: nothing was missing"] and sorted(folder.iterdir()) == files
    assert "secret" not in "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


def test_a_run_of_the_past_fills_wandb_offline_and_the_key_goes_nowhere(pictured: Settings):
    (sent,) = sync("wandb", pictured)
    assert "6 points" in sent and "2 pictures" in sent and "1 tables" in sent
    assert have("wandb", pictured) == wanted("wandb", pictured)
    rows = wandb_history(pictured.folder.path / "wandb")
    shown = [row for row in rows if "shardvit/picture" in row]
    assert [row["step"] for row in shown] == [1, 2, 2] and [row["_step"] for row in rows] == list(range(len(rows)))
    before = sorted((pictured.folder.path / "wandb").iterdir())
    assert sync("wandb", pictured) == ["pretrain: nothing was missing"]
    assert sorted((pictured.folder.path / "wandb").iterdir()) == before
    everything = b"".join(path.read_bytes() for path in pictured.folder.path.rglob("*") if path.is_file())
    assert KEY.encode() not in everything and b":secret@" not in everything.replace(b"me:secret@host/x\n", b"")


def test_tensorboard_shows_pictures_again_that_a_rollback_made_it_forget(run: Settings):
    words = {"title": "What", "caption": "How", "alt": "x", "group": "evaluation"}
    first = Attempt(run, sink=sink_named("tensorboard", run))
    first.log(1, 2, 3, 4)
    for step in (1, 3):
        keep_image(run.folder.stage(run.stage), Picture("confusion", **words), png=png(), svg=b"<svg/>", step=step)
    first.sender.pictures_changed = True
    first.close("KILLED")
    second = Attempt(run, resume_step=2, sink=sink_named("tensorboard", run))
    second.log(3, 4)
    assert second.close("FINISHED") == ""
    events = opened(run.folder.stage(run.stage) / "tensorboard")
    assert [each.step for each in events.Images("evaluation/confusion")] == [1, 3]
    assert len(events.Tensors("description")) == 1


@BOTH
def test_a_stage_that_was_begun_again_is_another_curve(name: SinkName, run: Settings):
    first = Attempt(run, sink=sink_named(name, run))
    first.log(1, 2, 3)
    first.close("KILLED")
    stage = run.folder.stage(run.stage)
    (run.folder.path / "replaced").mkdir()
    stage.rename(run.folder.path / "replaced" / "pretrain-1")
    if name == "wandb":
        shutil.rmtree(run.folder.path / "wandb")
    second = Attempt(run, sink=sink_named(name, run))
    second.log(1)
    assert second.close("FINISHED") == ""
    assert have(name, run) == wanted(name, run)


def test_events_that_were_deleted_are_written_again(run: Settings):
    attempt = Attempt(run, sink=sink_named("tensorboard", run))
    attempt.log(1, 2)
    attempt.close("FINISHED")
    shutil.rmtree(run.folder.stage(run.stage) / "tensorboard")
    sent = sync("tensorboard", run)
    assert "4 points" in sent[0] and "is not in this store" in sent[1]
    assert have("tensorboard", run) == wanted("tensorboard", run)


@pytest.mark.parametrize("link", ["pretrain/tensorboard", "tensorboard", "wandb", "wandb/latest-run"])
def test_a_strangers_link_leads_nothing_out_of_the_run(pictured: Settings, link: str, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    path = pictured.folder.path / link
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="is a link out of"):
        sync("wandb" if "wandb" in link else "tensorboard", pictured)
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_strangers_progress_file_is_no_more_than_that(pictured: Settings):
    hostile = {"key": "a" * 8, "run_id": "../x", "attempt": 0, "sent_rows": 99, "sent": {"x y": "sent", "session": "1"}}
    for name in ("tensorboard", "wandb"):
        state_of(name, pictured).write_text(json.dumps(hostile))
        sync(name, pictured)
        assert have(name, pictured) == wanted(name, pictured)


def test_online_wandb_gets_the_same_once_across_an_outage_and_a_kill(run: Settings, monkeypatch: pytest.MonkeyPatch):
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_BASE_URL", server.address)
        attempt = Attempt(run, sink=sink_named("wandb", run))
        attempt.log(1, 2, 3)
        until(lambda: any(each.history for each in server.runs.values()))
        server.is_alive = False
        attempt.log(4, 5)
        time.sleep(1)
        server.is_alive = True
        before = state_of("wandb", run).read_bytes()
        attempt.log(6)
        attempt.close("KILLED")
        state_of("wandb", run).write_bytes(before)  # as a kill may leave it
        second = Attempt(run, resume_step=4, sink=sink_named("wandb", run))
        second.log(5, 6, 7)
        (pipeline,) = [name for name, each in server.runs.items() if each.bucket["jobType"] == "pipeline"]
        assert second.close("FINISHED") == "" and second.said == [f"W&B: {server.address}/me/mine/runs/{pipeline}"]
        (stage,) = [each for each in server.runs.values() if each.bucket["jobType"] == "pretrain"]
        assert wandb_curves(stage.rows) == wanted("wandb", run)
        assert [row["shardvit/row"] for row in stage.rows] == list(range(1, 10))
        assert stage.bucket["groupName"] == "small" and stage.bucket["project"] == "mine"
        assert "secret" not in json.dumps(stage.bucket)


def test_wandbs_own_sync_uploads_offline_sessions_as_one_run(run: Settings):
    for resumed in (0, 2):
        attempt = Attempt(run, resume_step=resumed, sink=sink_named("wandb", run))
        attempt.log(*range(resumed + 1, resumed + 4))
        attempt.close("FINISHED")
    with wandb_server() as server:
        environ = {**os.environ, "WANDB_BASE_URL": server.address}
        del environ["WANDB_MODE"]
        folders = sorted((run.folder.path / "wandb").glob("offline-run-*"))
        for folder in folders:
            command = [sys.executable, "-m", "wandb", "sync", str(folder)]
            subprocess.run(command, env=environ, cwd=run.folder.runs_root, check=True, capture_output=True, timeout=200)
        (stage,) = [each for each in server.runs.values() if each.history]
        assert wandb_curves(stage.rows) == wanted("wandb", run)


def test_a_wandb_server_that_is_gone_is_said_once_and_holds_nobody_up(run: Settings, monkeypatch: pytest.MonkeyPatch):
    """In the process that a run starts: TensorBoard gets all."""
    code = """
        import os, sys
        from pathlib import Path
        from shardvit.launch.draw_and_send import DrawAndSend
        from shardvit.pipeline.runs.run_folder import RunFolder

        folder = RunFolder(Path(sys.argv[1]), "small")
        with DrawAndSend(folder, environ=os.environ, pictures="off", say=print) as beside:
            beside.ask("pretrain", "begin", 0)
            beside.close(patience_seconds=60)
    """
    attempt = Attempt(run, sends=False)
    attempt.log(1, 2, 3)
    attempt.close("FINISHED")
    environ = {**os.environ, "WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9"}
    command = [sys.executable, "-c", textwrap.dedent(code), str(run.folder.runs_root)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True, timeout=400)
    lines = done.stderr.splitlines()
    assert not [line for line in lines if line.startswith("TensorBoard")] and KEY not in done.stderr
    assert len([line for line in lines if line.startswith("W&B")]) == 2 and "shardvit sync" in lines[-1]
    assert have("tensorboard", run) == wanted("tensorboard", run)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert "6 points" in sync("wandb", run)[0]  # afterwards
    assert have("wandb", run) == wanted("wandb", run)


def test_a_package_or_login_that_is_missing_is_a_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(choose, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb"):
        with pytest.raises(UserError, match=rf"tracking.to.*pip install 'shardvit\[{name}\]'"):
            check_sinks([name])
    monkeypatch.undo()
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    with pytest.raises(UserError, match="wandb login"):
        check_sinks(["wandb"])
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(UserError, match="WANDB_MODE is 'sometimes'"):
        check_sinks(["wandb"])
    for mode in ("offline", "disabled"):
        monkeypatch.setenv("WANDB_MODE", mode)
        check_sinks(["wandb", "mlflow", "tensorboard"])


def test_no_service_is_a_choice(run: Settings):
    assert sinks_of(run.folder, run.recipe, names=(), uri=None, experiment=None) == []
    recipe = load_recipe("digits", overrides=["tracking.to=[]"])
    assert recipe.tracking.to == () and load_recipe("digits").tracking.to == ("mlflow",)

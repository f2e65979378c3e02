"""`shardvit.run` ends as the command does: resumed, refused, stopped or failed; in scripts, threads and notebooks."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest

import shardvit
from shardvit.pipeline.runs.logs import MetricsLog
from tests.conftest import ROOT
from tests.traps import lay_traps

STAGE = {"image_size": 16, "global_batch_size": 16, "optimizer": {"name": "adamw", "lr": 0.001}}
RECIPE: dict[str, Any] = {
    "name": "small",
    "processes": 1,
    "model": {"width": 16, "depth": 1, "heads": 2, "patch_size": 8},
    "engine": {"precision": "fp32"},
    "stages": {"pretrain": {**STAGE, "train": "shards/train", "eval": "shards/val", "duration": "4 steps"}},
}
BIND = {"pretrain.duration": "100000 steps", "pretrain.eval_every": "100000 steps", "pretrain.log_every": "50 steps"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preloaded_environment: Mapping[str, str]) -> Path:
    for name, value in preloaded_environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    shardvit.pack("digits", "shards", holdout=0.2, report=[].append)
    return tmp_path


def script(folder: Path, text: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text("import shardvit\n" + textwrap.dedent(text))
    return subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_training(folder: Path) -> None:
    rows = folder / "runs" / "small" / "pretrain" / "metrics.jsonl"
    for _ in range(12_000):
        if rows.is_file() and rows.stat().st_size:
            return
        time.sleep(0.01)
    raise AssertionError("no step was logged")


def test_a_run_resumes_is_skipped_when_done_and_refused_when_changed(folder: Path):
    run = shardvit.run(RECIPE)
    first = run.metrics()
    assert run.path == Path("runs/small") and run.stages["pretrain"].state == "done"
    assert shardvit.run(RECIPE).metrics().equals(first)
    with pytest.raises(shardvit.UserError, match="4 steps -> 8 steps"):
        shardvit.run(RECIPE, **{"pretrain.duration": "8 steps"})


@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_to_a_script_saves_and_is_an_exception_and_the_same_call_resumes(folder: Path, sent: signal.Signals):
    process = script(
        folder,
        f"""
        try:
            shardvit.run({RECIPE!r}, **{BIND!r})
        except shardvit.Stopped as error:
            print("stopped:", error)
        """,
    )
    wait_for_training(folder)
    process.send_signal(sent)
    out, err = process.communicate(timeout=240)
    assert "stopped: runs/small was stopped and has saved" in out, out + err
    record = shardvit.load_run("runs/small").stages["pretrain"]
    assert record.state == "running" and record.last_saved_step > 0
    model = shardvit.load_run("runs/small").model("pretrain", checkpoint=record.last_saved_step)
    assert str(record.last_saved_step) in model.origin
    with pytest.raises(shardvit.UserError, match=f"no checkpoint of step 1: it has .*{record.last_saved_step}"):
        shardvit.load_run("runs/small").model("pretrain", checkpoint=1)


def test_a_mistake_that_only_the_ranks_find_is_said_by_the_exception(folder: Path):
    for tar in (folder / "shards" / "train").glob("*.tar"):
        tar.write_bytes(tar.read_bytes().replace(b"IDAT", b"IDOT"))
    with pytest.raises(shardvit.UserError, match="damaged"):
        shardvit.run(RECIPE)


def test_a_killed_rank_is_a_failed_run(folder: Path):
    process = script(
        folder,
        f"""
        try:
            shardvit.run({RECIPE!r}, **{BIND!r})
        except shardvit.RunFailed as error:
            print("failed:", error)
        """,
    )
    wait_for_training(folder)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout
    for child in children.split():
        os.kill(int(child), signal.SIGKILL)
    out, err = process.communicate(timeout=240)
    assert "failed: runs/small is not finished" in out, out + err


def test_a_script_without_a_guard_in_a_repository_of_the_same_names(folder: Path):
    sprung = lay_traps(folder, names=("model", "launch", "deepspeed", "mlflow", "pipeline", "data_shards", "tests"))
    process = script(
        folder,
        f"""
        import sys
        run = shardvit.run({RECIPE!r})
        assert "torch" not in sys.modules
        print(run.stages["pretrain"].state)
        import subprocess
        subprocess.run([sys.executable, "-c", "import os; assert 'PYTHONSAFEPATH' not in os.environ"], check=True)
        """,
    )
    out, err = process.communicate(timeout=240)
    assert out.endswith("done\n"), out + err
    assert sprung() == []


def test_a_run_works_outside_of_the_main_thread(folder: Path):
    found: list[shardvit.LoadedRun] = []
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    thread = threading.Thread(target=lambda: found.append(shardvit.run(RECIPE)))
    thread.start()
    thread.join()
    assert found and found[0].stages["pretrain"].state == "done"
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_the_frame_is_what_the_file_says(tmp_path: Path):
    stage = tmp_path / "runs" / "x" / "pretrain"
    stage.mkdir(parents=True)
    (stage / "stage.json").write_text('{"state": "running", "images_seen": 64}')
    loss = [2.302585363388061, 2.3, float("nan"), 1e-300]
    with MetricsLog(stage / "metrics.jsonl", resume_step=-1) as log:
        for step, value in enumerate(loss, start=1):
            log.append(step=step, images_seen=16 * step, metrics={"train/loss": value})
            if step % 2 == 0:
                log.append(step=step, images_seen=16 * step, metrics={"val/top1": step / 8})
    run = shardvit.load_run(tmp_path / "runs" / "x")
    frame = run.metrics()
    assert frame["step"].tolist() == [1, 2, 3, 4] and frame["images_seen"].tolist() == [16, 32, 48, 64]
    numpy.testing.assert_array_equal(frame["train/loss"], loss)
    numpy.testing.assert_array_equal(frame["val/top1"], [float("nan"), 0.25, float("nan"), 0.5])
    assert str(frame["time"].dtype).startswith("datetime64") and frame["stage"].unique().tolist() == ["pretrain"]
    assert run.metrics("finetune").empty
    assert list(run.metrics("finetune")) == ["stage", "step", "images_seen", "time"]
    assert (run.name, run.stages["pretrain"].images_seen) == ("x", 64)
    with MetricsLog(stage / "metrics.jsonl", resume_step=4) as log:
        log.append(step=5, images_seen=80, metrics={"train/loss": 1.0})
    assert run.metrics()["step"].tolist() == [1, 2, 3, 4, 5], "it follows a run that trains"


def test_a_folder_that_is_no_run_is_a_users_mistake(tmp_path: Path):
    with pytest.raises(shardvit.UserError, match="is no run"):
        shardvit.load_run(tmp_path)

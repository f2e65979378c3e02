"""The drawing process: it draws what is asked for, ends with rank 0, and no failure of it reaches training."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardvit.launch.draw_and_send import DrawAndSend
from shardvit.pipeline.pictures import drawing
from shardvit.pipeline.pictures.style import Drawn
from shardvit.pipeline.ranks.process import process_started
from shardvit.pipeline.recipe.io import dump_recipe, load_recipe
from shardvit.pipeline.runs.logs import MetricsLog
from shardvit.pipeline.runs.run_folder import RunFolder, StageRecord
from shardvit.pipeline.tracking.describe import begin_attempt, end_attempt
from tests.left_behind import mlflow_states


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(runs_root=tmp_path, name="digits")
    folder.path.mkdir()
    (folder.path / "recipe.yaml").write_text(dump_recipe(load_recipe("digits", overrides=["tracking.mode=offline"])))
    folder.write("finetune", StageRecord(state="running", total_steps=50))
    return folder


def open_beside(folder: RunFolder, said: list[str]) -> DrawAndSend:
    return DrawAndSend(folder, environ=dict(os.environ), pictures="draw", say=said.append)


def noted(folder: RunFolder) -> dict[str, int]:
    return json.loads((folder.stage("finetune") / "pictures" / "drawn.json").read_text())


def wait_for(condition: Callable[[], object], *, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_is_asked_for_is_drawn(folder: RunFolder) -> None:
    said: list[str] = []
    with open_beside(folder, said) as beside:
        beside.ask("finetune", "begin", 7)
        beside.ask("masked_patch", "begin", 0)  # the recipe has none
        beside.ask("finetune", "evaluated", 10)
        wait_for((folder.stage("finetune") / "pictures" / "drawn.json").is_file, seconds=300)
        beside.close(patience_seconds=300)
    assert noted(folder)["evaluated"] == 10 and "masked_patch" in (folder.path / "pictures.log").read_text()
    assert said == []


@pytest.fixture
def endless(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A drawer that writes this file and never comes to an end, which the forked process inherits."""
    begun = folder.stage("finetune") / "pictures" / "grid" / "begun"

    def draw_for_ever(request: object) -> list[Drawn]:
        begun.parent.mkdir(parents=True)
        begun.with_name(f".step.png.{os.getpid()}.tmp").touch()
        begun.touch()
        while True:
            time.sleep(1)

    monkeypatch.setattr(drawing, "drawers", lambda moment: [draw_for_ever])
    return begun


def test_nobody_waits_for_a_picture(folder: RunFolder, endless: Path) -> None:
    said: list[str] = []
    with open_beside(folder, said) as beside:
        beside.ask("finetune", "end", 50)
        wait_for(endless.is_file)
        beside.close(patience_seconds=1e6)
    assert beside._child.returncode == 0 and not any("missing" in line for line in said)
    assert [each.name for each in endless.parent.iterdir()] == ["begun"]  # nothing half written is left


def test_before_a_stage_has_begun_nothing_is_written_or_sent(folder: RunFolder) -> None:
    with open_beside(folder, []) as beside:
        pass
    assert beside._child.returncode == -signal.SIGKILL and not (folder.path / "pictures.log").exists()


def test_what_drawing_takes_is_known_while_it_goes_on(folder: RunFolder) -> None:
    with open_beside(folder, []) as beside:
        beside.ask("finetune", "begin", 7)
        while beside.cpu_seconds() < 0.1:
            time.sleep(0.02)
        child = beside._child
        child.kill()
        child.wait()
        assert beside.cpu_seconds() == 0


def test_a_process_that_was_killed_costs_a_line(folder: RunFolder) -> None:
    said: list[str] = []
    with open_beside(folder, said) as beside:
        beside.ask("finetune", "begin", 0)
        child = beside._child
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        for _ in range(3):
            beside.ask("finetune", "evaluated", 10)
    assert len(said) == 1 and "shardvit report" in said[0]


def test_who_is_in_a_hurry_does_not_wait(folder: RunFolder) -> None:
    said: list[str] = []
    with open_beside(folder, said) as beside:
        beside.ask("finetune", "begin", 0)
        child = beside._child
        os.kill(child.pid, signal.SIGSTOP)
        beside.close(patience_seconds=300, hurry=lambda: True)
    assert child.returncode == -signal.SIGKILL and "shardvit report" in said[-1]


def test_a_pipe_that_is_full_stops_nobody(folder: RunFolder) -> None:
    said: list[str] = []
    with open_beside(folder, said) as beside:
        beside.ask("finetune", "begin", 0)
        os.kill(beside._child.pid, signal.SIGSTOP)
        for step in range(5_000):
            beside.ask("finetune", "evaluated", step)
        beside._child.kill()  # else its end is waited for
    assert len([line for line in said if "no pictures for now" in line]) == 1


def test_where_no_pictures_are_wanted_it_only_sends(folder: RunFolder) -> None:
    with DrawAndSend(folder, environ=dict(os.environ), pictures="off", say=print) as beside:
        beside.ask("finetune", "begin", 0)
        beside.close(patience_seconds=300)
    assert not (folder.stage("finetune") / "pictures").exists()
    assert (folder.path / "tracking/environment.txt").is_file()


def test_it_ends_with_rank_0(folder: RunFolder) -> None:
    code = """
        import os, sys, time
        from pathlib import Path
        from shardvit.launch.draw_and_send import DrawAndSend
        from shardvit.pipeline.runs.run_folder import RunFolder

        beside = DrawAndSend(RunFolder(Path(sys.argv[1]), "digits"), environ=os.environ, pictures="draw", say=print)
        beside.ask("finetune", "begin", 0)
        print(beside._child.pid, flush=True)
        time.sleep(600)
    """
    rank = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(folder.runs_root)], stdout=subprocess.PIPE
    )
    assert rank.stdout is not None
    child = int(rank.stdout.readline())
    started = process_started(child)
    rank.kill()
    rank.communicate()
    end = time.monotonic() + 120
    while process_started(child) == started:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_training_wrote_is_sent_and_a_dead_server_costs_a_sentence(folder: RunFolder) -> None:
    recipe = load_recipe("digits")
    (folder.path / "recipe.yaml").write_text(dump_recipe(recipe))
    code = """
        import os, sys
        from pathlib import Path
        from shardvit.launch.draw_and_send import DrawAndSend
        from shardvit.pipeline.runs.run_folder import RunFolder

        folder = RunFolder(Path(sys.argv[1]), "digits")
        with DrawAndSend(folder, environ=os.environ, pictures="off", say=print) as beside:
            beside.ask("finetune", "begin", 0)
            if sys.argv[2] == "finished":
                beside.close(patience_seconds=240)
    """
    with MetricsLog(folder.stage("finetune") / "metrics.jsonl", resume_step=0) as log:
        begin_attempt(folder, recipe, "finetune", params={}, tags={})
        log.append(step=1, images_seen=64, metrics={"train/loss": 1.0})
    end_attempt(folder, "finetune", "FINISHED")
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder.runs_root)]
    dead = {**os.environ, "MLFLOW_TRACKING_URI": "http://me:secret@127.0.0.1:9"}
    done = subprocess.run([*command, "stopped"], env=dead, capture_output=True, text=True, check=True)
    assert "1 points and " in done.stderr and "shardvit sync" in done.stderr and "secret" not in done.stderr
    alive = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    done = subprocess.run([*command, "finished"], env=alive, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert mlflow_states(folder.runs_root / "mlflow.db")["finetune"] == ["FINISHED"]

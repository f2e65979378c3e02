"""The drawing process: it draws what is asked for, ends with rank 0, and no failure of it reaches training."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from pipeline.pictures.draw_process import Beside
from pipeline.recipe.io import dump_recipe, load_recipe
from pipeline.runs.run_folder import RunFolder, StageRecord


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(runs_root=tmp_path, name="digits")
    folder.path.mkdir()
    (folder.path / "recipe.yaml").write_text(dump_recipe(load_recipe("digits")))
    folder.write("finetune", StageRecord(state="running", total_steps=50))
    return folder


def open_beside(folder: RunFolder, said: list[str]) -> Beside:
    return Beside(folder, environ=dict(os.environ), say=said.append, module="launch.pages.draw_process")


def noted(folder: RunFolder) -> dict[str, int]:
    return json.loads((folder.stage("finetune") / "pictures" / "drawn.json").read_text())


def test_what_is_asked_for_is_done_before_it_ends(folder: RunFolder) -> None:
    said: list[str] = []
    with open_beside(folder, said) as beside:
        beside.ask("finetune", "begin", 7)
        beside.ask("masked_patch", "begin", 0)  # the recipe has none
        beside.ask("finetune", "evaluated", 10)
        beside.close(patience_seconds=300)
    assert noted(folder)["evaluated"] == 10 and "masked_patch" in (folder.path / "pictures.log").read_text()
    assert not any("not drawn" in line for line in said)


def test_what_drawing_takes_is_known_while_it_goes_on(folder: RunFolder) -> None:
    with open_beside(folder, []) as beside:
        assert beside.cpu_seconds() == 0
        beside.ask("finetune", "begin", 7)
        while beside.cpu_seconds() < 0.1:
            time.sleep(0.02)
        child = beside._child
        assert child is not None
        child.kill()
        child.wait()
        assert beside.cpu_seconds() == 0


def test_without_a_request_there_is_no_process(folder: RunFolder) -> None:
    with open_beside(folder, []) as beside:
        beside.close(patience_seconds=300)
    assert not (folder.path / "pictures.log").exists()


def test_a_process_that_was_killed_costs_a_line(folder: RunFolder) -> None:
    said: list[str] = []
    with open_beside(folder, said) as beside:
        beside.ask("finetune", "begin", 0)
        child = beside._child
        assert child is not None
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
        assert child is not None
        os.kill(child.pid, signal.SIGSTOP)
        beside.close(patience_seconds=300, hurry=lambda: True)
    assert child.returncode == -signal.SIGKILL and "shardvit report" in said[-1]


def test_a_pipe_that_is_full_stops_nobody(folder: RunFolder) -> None:
    said: list[str] = []
    with open_beside(folder, said) as beside:
        beside.ask("finetune", "begin", 0)
        assert beside._child is not None
        os.kill(beside._child.pid, signal.SIGSTOP)
        for step in range(5_000):
            beside.ask("finetune", "evaluated", step)
    assert len([line for line in said if "no pictures for now" in line]) == 1


def test_moments_that_are_not_wanted_start_nothing(folder: RunFolder) -> None:
    with Beside(
        folder, environ=dict(os.environ), say=print, module="launch.pages.draw_process", moments=("end",)
    ) as beside:
        beside.ask("finetune", "begin", 0)
        beside.ask("finetune", "evaluated", 10)
        assert beside._child is None

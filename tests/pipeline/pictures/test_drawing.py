"""Drawing: what is due is drawn once, a drawer that fails costs its own picture alone, and what is missing is found."""

from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.pictures import drawing
from shardvit.pipeline.pictures.drawing import Drawer, draw_missing, request_of
from shardvit.pipeline.pictures.style import Drawn
from shardvit.pipeline.recipe.io import dump_recipe, load_recipe
from shardvit.pipeline.runs.pictures import DrawRequest, Moment
from shardvit.pipeline.runs.run_folder import RunFolder, StageRecord


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of the recipe digits: pretrain is done after 800 steps, finetune has begun."""
    folder = RunFolder(runs_root=tmp_path, name="digits")
    folder.path.mkdir()
    (folder.path / "recipe.yaml").write_text(dump_recipe(load_recipe("digits")))
    folder.write("pretrain", StageRecord(state="done", total_steps=800, last_saved_step=800))
    folder.write("swap_head", StageRecord(state="done"))
    folder.write("finetune", StageRecord(state="running", total_steps=50))
    return folder


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """(moment, stage, step) of each drawing."""
    found: list[tuple[str, str, int]] = []

    def drawers(moment: Moment) -> list[Drawer]:
        def note(request: DrawRequest) -> list[Drawn]:
            found.append((moment, request.stage, request.step))
            return []

        return [note]

    monkeypatch.setattr(drawing, "drawers", drawers)
    return found


def test_what_is_missing_is_drawn_once(folder: RunFolder, drawn: list[tuple[str, str, int]]) -> None:
    expected = [("begin", "pretrain", 0), ("end", "pretrain", 800), ("begin", "finetune", 0)]
    draw_missing(folder, say=print)
    assert drawn == expected
    draw_missing(folder, say=print)
    assert drawn == expected


def test_a_stage_that_was_begun_again_is_drawn_again(folder: RunFolder, drawn: list[tuple[str, str, int]]) -> None:
    draw_missing(folder, say=print)
    drawn.clear()
    folder.write("finetune", StageRecord(state="done", total_steps=50))
    (folder.stage("pretrain") / "pictures" / "drawn.json").write_text('{"begin": []')
    draw_missing(folder, say=print)
    assert drawn == [("begin", "pretrain", 0), ("end", "pretrain", 800), ("end", "finetune", 50)]


def test_a_drawer_that_fails_is_named_and_tried_again(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def draw_badly(request: DrawRequest) -> list[Drawn]:
        calls.append("bad")
        raise RuntimeError("no \x1b[31mcolour")

    def draw_well(request: DrawRequest) -> list[Drawn]:
        calls.append("good")
        return []

    monkeypatch.setattr(drawing, "drawers", lambda moment: [draw_badly, draw_well])
    said: list[str] = []
    for _ in range(2):
        drawing.draw(request_of(folder, stage="pretrain", step=5), moment="begin", say=said.append)
    assert calls == ["bad", "good"] * 2
    assert "draw_badly" in said[0] and "RuntimeError: no \\x1b[31mcolour" in said[0]
    assert not (folder.stage("pretrain") / "pictures" / "drawn.json").exists()


@pytest.mark.parametrize("name", ["model", "model/model.safetensors", "pretrain"])
def test_nothing_is_drawn_of_what_is_a_link_out_of_the_run(
    folder: RunFolder, drawn: list[tuple[str, str, int]], tmp_path: Path, name: str
) -> None:
    mine = tmp_path / "mine"
    (mine / "model").mkdir(parents=True)
    (mine / "model/model.safetensors").touch()
    path = folder.stage("pretrain") if name == "pretrain" else folder.stage("pretrain") / name
    if name == "pretrain":
        path.rename(mine / "pretrain")
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(mine / name)
    if name == "pretrain":
        draw_missing(folder, say=print)
    else:
        with pytest.raises(UserError, match="is a link out of"):
            draw_missing(folder, say=print)
    assert "pretrain" not in {stage for _, stage, _ in drawn}


def test_a_stage_that_there_is_not(folder: RunFolder) -> None:
    with pytest.raises(UserError, match="masked_patch"):
        request_of(folder, stage="masked_patch", step=0)

"""`shardvit report` and `compare`, as typed."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from data_shards.errors import UserError
from launch.report.command import compare, report, report_beside, run_names
from launch.report.compare import WIDTH, plot
from launch.report.curves import Curve
from launch.report.facts import held_out_fact, stage_rows
from launch.report.sections import runs_page
from pipeline.recipe.io import dump_recipe, load_recipe
from pipeline.report.history import read_history
from pipeline.run_folder import RunFolder
from tests.launch.report.runs import HOSTILE, make_hostile, make_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made") / "runs"
    make_run(root, "one", points=20)
    make_run(root, "two", overrides=("seed=1", "stages.finetune.optimizer.lr=0.5"), points=20)
    make_hostile(make_run(root, "hostile", words=HOSTILE, points=20))
    return root


@pytest.fixture
def runs(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunFolder]:
    shutil.copytree(made, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return [RunFolder(Path("runs"), name) for name in ("one", "two", "hostile")]


def test_a_run_has_its_page_within_its_folder(runs: list[RunFolder], capsys: pytest.CaptureFixture[str]) -> None:
    assert report(runs[0].path, no_draw=True) == 0
    assert capsys.readouterr().out == "report  runs/one/report.html\n"
    html = (runs[0].path / "report.html").read_text()
    assert "51,200" in html and "0.9800" in html and "pets" in html
    assert {path.name for path in runs[0].path.iterdir()} >= {"report.html", "recipe.yaml"}


def test_beside_the_score_stands_what_it_is_to_be_compared_with(runs: list[RunFolder]) -> None:
    known = {"val/top1": 0.6141, "val/balanced_accuracy": 0.5002, "val/commonest_class_share": 0.614, "val/loss": 1.0}
    runs[0].update("finetune", results=known)
    history = read_history(runs[0])
    assert held_out_fact(history) == (
        "61.4 %",
        "held-out top-1 after finetune; balanced accuracy 50.0 %; commonest class 61.4 %",
    )
    columns, rows = stage_rows(history)
    last = dict(zip(columns, rows[-1], strict=True))
    assert (last["held-out score"], last["balanced accuracy"], last["commonest class"]) == (0.6141, 0.5002, 0.614)
    pretrain = dict(zip(columns, rows[0], strict=True))
    assert pretrain["balanced accuracy"] is None  # of an older run
    html = runs_page([history, read_history(runs[1])], ["one", "two"]).html
    assert "0.5002" in html and "commonest class" in html


def test_several_runs_have_one_beside_them_or_where_it_is_asked_for(
    runs: list[RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [folder.path for folder in runs[:2]]
    assert compare(*paths, no_draw=True) == 0
    out = capsys.readouterr().out
    assert out.endswith("report  runs/report.html\n")
    assert compare(*paths, output=Path("x.html"), no_draw=True) == 0
    assert Path("x.html").read_text() == Path("runs/report.html").read_text()
    rows = [line.split() for line in out.splitlines()]
    assert ["seed", "0", "1"] in rows and ["stages.finetune.optimizer.lr", "0.02", "0.5"] in rows
    assert ["val/loss", "0.11", "0.11", "+0"] in rows
    assert all(len(line) <= WIDTH for line in out.splitlines() if "│" in line or "└" in line)


def test_runs_are_told_apart_by_their_folders_where_names_are_alike(runs: list[RunFolder], tmp_path: Path) -> None:
    shutil.copytree("runs/one", tmp_path / "elsewhere" / "one")
    histories = [read_history(folder) for folder in (runs[0], RunFolder(tmp_path / "elsewhere", "one"))]
    names = run_names(histories)
    assert len(set(names)) == 2
    assert run_names(histories[:1]) == ["one"]


def test_a_run_beside_others_shows_what_they_share(runs: list[RunFolder]) -> None:
    page = report_beside(runs[0], others=runs[1:2]).read_text()
    assert "Beside two" in page and 'data-group="finetune-2"' in page and 'data-group="pretrain-1"' in page


def test_a_hostile_run_is_compared_without_a_control_character(
    runs: list[RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(runs[0].path, runs[2].path, no_draw=True) == 0
    captured = capsys.readouterr()
    for text in (captured.out, captured.err):
        assert all(each.isprintable() or each == "\n" for each in text)


MASKED = (
    "masked_patch={train: a, eval: b, image_size: 16, global_batch_size: 8, duration: 8 steps, "
    "optimizer: {name: adamw, lr: 0.1}}"
)


@pytest.mark.parametrize(
    ("overrides", "exports"),
    [
        ([], "--format timm # or npz, big_vision, transformers, torchvision, onnx, torch_export"),
        (["model.resnet_layers=[]"], "--format npz # or onnx, torch_export"),
        (["pretrain=null", "swap_head=null", "finetune=null", MASKED], None),
        (None, None),
    ],
)
def test_the_commands_to_go_on_name_only_what_the_model_can_do(
    runs: list[RunFolder], overrides: list[str] | None, exports: str | None
) -> None:
    recipe = load_recipe("digits", overrides=["name=one", *(overrides or ())])
    (runs[0].path / "recipe.yaml").write_text("?" if overrides is None else dump_recipe(recipe))
    if "masked_patch" in recipe.stages.names:
        runs[0].update("masked_patch", state="done")
    assert report(runs[0].path, no_draw=True) == 0
    said = " ".join((runs[0].path / "report.html").read_text().split())
    run = runs[0].path.resolve()
    for command in ("predict", "eval", "export"):
        assert (f"shardvit {command} {run}" in said) == (exports is not None)
    assert exports is None or f"shardvit export {run} {exports}" in said


def test_a_run_that_has_not_begun_has_a_page_with_the_command(runs: list[RunFolder]) -> None:
    folder = runs[0]
    for stage in ("pretrain", "swap_head", "finetune"):
        for file in sorted(folder.stage(stage).rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
    assert report(folder.path, no_draw=True) == 0
    html = (folder.path / "report.html").read_text()
    assert "shardvit run" in html and '<svg class="plot"' not in html


MISTAKES = {
    "folder": (report, []),
    "two": (compare, ["runs/one"]),
    "runs is no run": (report, ["runs"]),
    "gone is no run": (report, ["gone"]),
    "twice": (report, ["runs/one", "runs/../runs/one"]),
}


@pytest.mark.parametrize("word", MISTAKES)
def test_mistakes_are_one_sentence(runs: list[RunFolder], word: str) -> None:
    command, arguments = MISTAKES[word]
    with pytest.raises(UserError, match=word) as caught:
        command(*map(Path, arguments))
    assert "\n" not in str(caught.value)


def test_a_place_that_cannot_be_written_is_named(runs: list[RunFolder]) -> None:
    with pytest.raises(UserError, match="--output"):
        report(runs[0].path, output=Path("gone/x.html"), no_draw=True)


def test_curves_in_characters_show_where_each_is() -> None:
    steps = np.arange(1, 11)
    curves = [
        (mark, Curve("x", "", False, steps, 64 * steps, steps * 1.0, sign * steps * 1.0))
        for mark, sign in (("A", 1), ("B", -1))
    ]
    lines = plot(curves, width=60, height=7).splitlines()
    assert all(len(line) <= 60 for line in lines)
    assert "A" in lines[0] and "B" in lines[6] and lines[0].rindex("A") > 50

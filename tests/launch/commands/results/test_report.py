"""`shardvit report` and `compare`, as typed."""

import re
import shutil
from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.launch.commands.results.report import compare, report
from shardvit.launch.pages.blocks import ShownNumber
from shardvit.launch.pages.compare import WIDTH
from shardvit.launch.pages.facts import held_out_fact, held_out_table
from shardvit.launch.pages.sections import named, runs_page, write_beside
from shardvit.pipeline.recipe.io import dump_recipe, load_recipe
from shardvit.pipeline.runs.logs import EventsLog
from shardvit.pipeline.runs.read import read_run
from shardvit.pipeline.runs.run_folder import RunFolder
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
    assert "51,200" in html and "98.00 %" in html and "pets" in html
    assert {path.name for path in runs[0].path.iterdir()} >= {"report.html", "recipe.yaml"}


def test_beside_the_score_stands_what_it_is_to_be_compared_with(runs: list[RunFolder]) -> None:
    known = {"val/top1": 0.6141, "val/balanced_accuracy": 0.5002, "val/commonest_class_share": 0.614, "val/loss": 1.0}
    runs[0].update("finetune", results=known)
    history = read_run(runs[0])
    assert held_out_fact(history) == (
        "61.41 %",
        "held-out top-1 after finetune; balanced accuracy 50.02 %; commonest class 61.40 %",
    )
    table = held_out_table(history)
    assert table is not None
    last, pretrain = (dict(zip(table.columns, row, strict=True)) for row in (table.rows[0], table.rows[-1]))
    beside = ("top-1", "balanced accuracy", "commonest class share")
    assert [last[each] for each in beside] == [
        ShownNumber("61.41 %", 0.6141),
        ShownNumber("50.02 %", 0.5002),
        ShownNumber("61.40 %", 0.614),
    ]
    assert pretrain["balanced accuracy"] is None  # of an older run
    html = runs_page({"one": history, "two": read_run(runs[1])}).html
    assert "50.02 %" in html and "commonest class" in html


def test_results_come_first_with_every_held_out_set_and_all_scores_are_in_per_cent(runs: list[RunFolder]) -> None:
    record = runs[0].record("finetune")
    results = {**record.results, "val_test/top1": 0.8125, "val_test/ema_calibration_error": 0.0375, "val_test/new": 3.5}
    runs[0].update("finetune", results=results)
    with EventsLog(runs[0].stage("finetune") / "events.jsonl") as events:
        events.append("note", "the best held-out top-1 was 0.8437, and accuracy 0.7500 before", step=5, images_seen=9)
    assert report(runs[0].path, no_draw=True) == 0
    html = re.sub("<(style|script).*?</\\1>", "", (runs[0].path / "report.html").read_text(), flags=re.DOTALL)
    places = [html.index(f"<h2>{title}</h2>") for title in ("Results", "finetune", "pretrain", "Recipe")]
    assert places == sorted(places)
    tables = re.findall("<table.*?</table>", html, re.DOTALL)
    rows = [re.findall("<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall("<tr>.*?</tr>", tables[0], re.DOTALL)]
    assert rows[0][:4] == ["stage", "held-out set", "images", "top-1"]
    assert rows[1][:4] == ["finetune", "digits-transfer/val", "252", "98.00 %"]
    of_test = dict(zip(rows[0], next(row for row in rows if row[1] == "test"), strict=True))
    assert (of_test["top-1"], of_test["new"]) == ("81.25 %", "3.5") and "3.75 %" in of_test.values()
    assert {"84.37 %", "75.00 %", "71.00 %"} <= set(re.findall(r"\d+\.\d\d %", html))
    text = re.sub("<[^>]+>", " ", html)
    assert not re.search(r"\b0\.(8125|0375|8437|75|71|98|99)0*\b", text)


def test_several_runs_have_one_beside_them_or_where_it_is_asked_for(
    runs: list[RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [folder.path for folder in runs[:2]]
    assert report(*paths, no_draw=True) == 0
    assert capsys.readouterr().out == "report  runs/report.html\n"
    assert compare(*paths, output=Path("x.html"), no_draw=True) == 0
    out = capsys.readouterr().out
    assert out.endswith("report  x.html\n")
    assert Path("x.html").read_text() == Path("runs/report.html").read_text()
    rows = [line.split() for line in out.splitlines()]
    assert ["seed", "0", "1"] in rows and ["stages.finetune.optimizer.lr", "0.02", "0.5"] in rows
    assert ["val/loss", "0.11", "0.11", "+0"] in rows
    _, *curves = out.split(", pretrain: ")[-1].split("(val/loss)")
    assert curves and "●" in curves[0] and "images" in curves[0]
    assert all(len(line) <= WIDTH for line in curves[0].splitlines())


def test_runs_are_told_apart_by_their_folders_where_names_are_alike(runs: list[RunFolder], tmp_path: Path) -> None:
    shutil.copytree("runs/one", tmp_path / "elsewhere" / "one")
    histories = [read_run(folder) for folder in (runs[0], RunFolder(tmp_path / "elsewhere", "one"))]
    assert list(named(histories).values()) == histories
    assert named(histories[:1]) == {"one": histories[0]}


def test_a_run_beside_others_shows_what_they_share(runs: list[RunFolder]) -> None:
    page = write_beside(runs[0], others=runs[1:2]).read_text()
    assert "Beside two" in page and 'data-group="finetune-2"' in page and 'data-group="pretrain-1"' in page


def test_a_hostile_run_is_compared_without_a_control_character(
    runs: list[RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(runs[0].path, runs[2].path) == 0
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

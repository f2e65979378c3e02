"""`shardvit table8`: what it runs, what it refuses, and the table it prints; one cell is trained for real."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cyclopts import App

from data_shards.errors import UserError
from launch.commands.models import table8
from launch.commands.models.table8 import CELLS, RECIPE, Result, format_results, run_cells
from launch.local.start import Launch
from launch.run import pipeline_run
from pipeline.recipe.io import load_recipe
from pipeline.runs.run_folder import RunFolder

Outcome = Callable[[Launch], int]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Stands in for the processes: what was started; each run ends at once, with a top-1 that tells which it was."""
    launches: list[Launch] = []

    def start(launch: Launch) -> int:
        launches.append(launch)
        folder = RunFolder(runs_root=launch.runs_root, name=launch.recipe.name)
        results = {"val/top1": 0.5 + len(launches) / 100, "val/images": 400.0}
        folder.update(launch.stage, state="done", images_seen=64, seconds=2.5, results=results)
        return 0

    monkeypatch.setattr(pipeline_run, "run_stage_locally", start)
    monkeypatch.setattr(pipeline_run, "num_gpus", lambda: 0)
    return launches


def command(*arguments: object) -> int:
    """`shardvit table8 ...` in this process."""
    app = App(name="shardvit")
    app.command(table8.table8)
    return app(["table8", *map(str, arguments)], exit_on_error=False, result_action="return_value")


def folders(top: Path) -> tuple[object, ...]:
    return "--runs", top / "runs", "--shards", top / "shards"


def test_the_cells_are_the_papers() -> None:
    assert {(cell.position, cell.at): cell.paper for cell in CELLS} == {
        ("none", "stem"): 0.61382,
        ("learned_1d", "stem"): 0.64206,
        ("learned_1d", "every_layer"): 0.63964,
        ("learned_1d", "every_layer_shared"): 0.64292,
        ("learned_2d", "stem"): 0.64001,
        ("learned_2d", "every_layer"): 0.64046,
        ("learned_2d", "every_layer_shared"): 0.64022,
        ("relative", "stem"): 0.64032,
        ("sincos_2d", "stem"): None,  # big_vision's, an extra row
    }


def test_one_run_for_each_cell_that_differs_in_its_positions_alone(tmp_path: Path, started: list[Launch]) -> None:
    assert command(*folders(tmp_path)) == 0
    assert [(launch.recipe.model.position, launch.recipe.model.position_at) for launch in started] == [
        (cell.position, cell.at) for cell in CELLS
    ]
    assert len({launch.recipe.name for launch in started}) == len(CELLS)
    alike = {
        launch.recipe.model_copy(
            update={
                "name": "",
                "model": launch.recipe.model.model_copy(update={"position": "none", "position_at": "stem"}),
            }
        ).model_dump_json()
        for launch in started
    }
    assert len(alike) == 1
    train = started[0].recipe.train_stage("pretrain").train
    assert [each.shards for each in train or ()] == [str(tmp_path / "shards/digits/train")]
    assert (tmp_path / "shards/digits/val").is_dir()


def test_the_table_has_the_papers_form(
    tmp_path: Path, started: list[Launch], capsys: pytest.CaptureFixture[str]
) -> None:
    command(*folders(tmp_path))
    text = (tmp_path / "runs/table8.txt").read_text()
    assert capsys.readouterr().out.endswith(f"\n\n{text}")
    assert text == (
        "position embedding              stem       every layer  every layer, shared\n"
        "---------------------------------------------------------------------------\n"
        "none                0.5100 (0.61382)               N/A                  N/A\n"
        "1-D                 0.5200 (0.64206)  0.5300 (0.63964)     0.5400 (0.64292)\n"
        "2-D                 0.5500 (0.64001)  0.5600 (0.64046)     0.5700 (0.64022)\n"
        "relative            0.5800 (0.64032)               N/A                  N/A\n"
        "sin-cos 2-D, fixed  0.5900                         N/A                  N/A\n"
        "Top-1 on 400 held-out images, one run each: one standard error is up to 0.0250.\n"
        "In brackets the ViT paper's Table 8: B/16, JFT-300M, ImageNet 5-shot; another measure, so only the order\n"
        "can be compared. The fixed sin-cos embedding is not in the paper's table.\n"
    )


def test_json(tmp_path: Path, started: list[Launch], capfd: pytest.CaptureFixture[str]) -> None:
    command(*folders(tmp_path), "--json")
    output = capfd.readouterr()
    table = json.loads(output.out)  # nothing else is on standard output
    assert "9 of 9: digits-positions-sincos-2d-stem" in output.err
    assert table == json.loads((tmp_path / "runs/table8.json").read_text())
    assert table[2] == {
        "position": "learned_1d",
        "position_at": "every_layer",
        "paper_5_shot": 0.63964,
        "run": "digits-positions-learned-1d-every-layer",
        "top1": 0.53,
        "images": 400,
        "seconds": 2.5,
    }


def test_done_runs_are_skipped_and_an_interrupted_one_ends_the_command(
    tmp_path: Path, started: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, stopped = pipeline_run.run_stage_locally, pipeline_run.EXIT_STOPPED
    stop_at_third = lambda launch: stopped if len(started) == 2 else finish(launch)  # noqa: E731
    monkeypatch.setattr(pipeline_run, "run_stage_locally", stop_at_third)
    assert command(*folders(tmp_path)) == stopped
    assert len(started) == 2 and not (tmp_path / "runs/table8.txt").exists()
    monkeypatch.setattr(pipeline_run, "run_stage_locally", finish)
    assert command(*folders(tmp_path)) == 0
    assert len(started) == len(CELLS)
    assert command(*folders(tmp_path)) == 0
    assert len(started) == len(CELLS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([RECIPE, "model.position=none"], "model.position is what table8 varies itself"),
        (["cifar10"], "--shards: only digits_positions's are packed"),
        (["model.depth=2"], "there is no recipe model.depth=2"),
    ],
)
def test_mistakes(tmp_path: Path, started: list[Launch], arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        command(*arguments, *folders(tmp_path))
    assert not started and not (tmp_path / "runs").exists()


def test_a_mistake_in_one_run_is_found_before_the_first_is_started(tmp_path: Path, started: list[Launch]) -> None:
    with pytest.raises(UserError, match=r"patch_dropout needs positions that are added once"):
        command(RECIPE, "stages.pretrain.patch_dropout=0.5", *folders(tmp_path))
    assert not started


def test_a_recipe_of_ones_own_keeps_its_shards(tmp_path: Path, started: list[Launch]) -> None:
    command(*folders(tmp_path))
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"extends: {RECIPE}\nname: mine\nstages:\n  pretrain:\n"
        f"    train: {tmp_path}/shards/digits/train\n    eval: {tmp_path}/shards/digits/val\n"
    )
    del started[:]
    assert command(recipe, "seed=4", "--runs", tmp_path / "others") == 0
    assert [launch.recipe.name for launch in started] == [f"mine-{cell.name}" for cell in CELLS]
    assert {launch.recipe.seed for launch in started} == {4}


def test_the_recipe_lets_every_cell_be_built() -> None:
    recipe = load_recipe(RECIPE)
    assert recipe.stages.names == ("pretrain",)
    sizes = recipe.model.sizes
    assert sizes.width % 4 == 0 and recipe.model.grid_size(recipe.train_stage("pretrain").image_size) > 1


def test_a_table_of_some_cells_shows_only_their_rows() -> None:
    results = [Result(cell, run="", top1=0.25, images=100, seconds=1.0) for cell in CELLS[:2]]
    assert [line.split()[0] for line in format_results(results).splitlines()[2:4]] == ["none", "1-D"]
    assert "2-D" not in format_results(results)


def test_one_cell_for_real(tmp_path: Path) -> None:
    """One that timm does not have, from end to end: built, initialised, trained, saved."""
    overrides = [
        *("processes=1", "model.depth=2", "model.width=16"),
        *("stages.pretrain.duration=6 steps", "stages.pretrain.global_batch_size=16"),
    ]
    cells = [cell for cell in CELLS if cell.name == "learned-2d-every-layer"]
    code, results = run_cells(
        cells, RECIPE, overrides=overrides, runs_root=tmp_path / "runs", shards_root=tmp_path / "shards"
    )
    assert code == 0
    assert [result.cell for result in results] == cells
    assert all(result.images == 539 and 0 < result.top1 < 1 and result.seconds > 0 for result in results)
    assert (tmp_path / "runs" / results[0].run / "pretrain/model/model.safetensors").is_file()

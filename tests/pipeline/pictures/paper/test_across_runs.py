"""The figures of several runs: which numbers they take from the folders, and what they leave out."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardvit.model.config import ModelConfig
from shardvit.model.counting.flops import account
from shardvit.model.saved.model_folder import SavedModelMeta
from shardvit.pipeline.pictures.paper.across_runs import few_shot_over_size, transfer_over_cost
from shardvit.pipeline.pictures.paper.measured_runs import cost_points, few_shot_points
from shardvit.pipeline.pictures.style import keep_picture
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.runs.pictures import kept_pictures
from shardvit.pipeline.runs.read import Run, read_run
from shardvit.pipeline.runs.run_folder import RunFolder, StageRecord
from shardvit.pipeline.transfer.results import TransferRecord, TransferScore, save_record
from tests.small_recipe import small_recipe, small_stage

SIZES: dict[str, Any] = {"width": 64, "depth": 6, "heads": 4, "patch_size": 4}


def _run(
    root: Path,
    name: str,
    *,
    recipe: str = "digits",
    training_images: int = 100,
    images_seen: int = 6400,
    few_shot: tuple[float, ...] = (0.25, 0.5),
    top1: float = 0.75,
    width: int = 64,
    more: tuple[str, ...] = (),
) -> Run:
    """A run's folder as training leaves it, without its model."""
    overrides = [f"name={name}", f"model.width={width}", *more]
    folder = RunFolder(runs_root=root, name=name)
    folder.open(load_recipe(recipe, overrides=overrides))
    config = ModelConfig(**(SIZES | {"width": width}))
    meta = SavedModelMeta(model=config, image_size=16, num_classes=7, class_names=tuple("0145679"), head="mlp")
    if recipe == "digits":
        folder.write(
            "pretrain",
            StageRecord(state="done", images_seen=images_seen, model=meta.model_dump(mode="json", exclude_none=True)),
        )
        rows = [
            {
                "step": number,
                "images_seen": number * images_seen // len(few_shot),
                "time": 1.0,
                "metrics": {"val/fewshot_pets_5shot": value, "perf/gpu_hours": 0.5 * number, "val/top1": 0.1},
            }
            for number, value in enumerate(few_shot, start=1)
        ]
        stage = folder.stage("pretrain")
        (stage / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        sets = {"sets": {"training images": {"num_samples": [training_images - 1, 1]}}}
        (stage / "data.json").write_text(json.dumps(sets))
    folder.write("finetune", StageRecord(state="done", images_seen=64, results={"val/top1": top1}))
    return read_run(folder)


def _record(run: Run, name: str, **changes: Any) -> None:
    fields: dict[str, Any] = {
        "command": "fewshot",
        "name": name,
        "model": "x",
        "model_digest": "y",
        "layer": "pooled",
        "run": run.name,
        "stage": "pretrain",
        "images_seen": 6400,
    }
    save_record(run.folder.path / "transfer" / f"{name}.json", TransferRecord(**(fields | changes)))


def _score(method: str, value: float, **settings: Any) -> TransferScore:
    return TransferScore("pets", method, "top1", value, (value,), settings)  # pyright: ignore[reportArgumentType]


def test_few_shot_points_are_those_of_the_curve_and_of_commands(tmp_path: Path) -> None:
    run = _run(tmp_path, "a")
    _record(run, "fewshot-pets", results=(_score("fewshot", 0.625, shots=5), _score("fewshot", 0.9, shots=10)))
    _record(run, "of-finetune", stage="finetune", results=(_score("fewshot", 0.99, shots=5),))
    (run.folder.path / "transfer" / "broken.json").write_text("{")
    points = list(few_shot_points(run, name="a"))
    assert [(each.shots, each.images_seen, each.top1) for each in points] == [
        (5, 3200, 0.25),
        (5, 6400, 0.625),  # measured at the end once more, by the command
        (10, 6400, 0.9),
    ]
    assert {each.training_images for each in points} == {100}


def test_few_shot_points_of_a_masked_autoencoder_are_of_its_own_stage(tmp_path: Path) -> None:
    folder = RunFolder(runs_root=tmp_path, name="mae")
    folder.open(Recipe.model_validate(small_recipe("mae", masked_autoencoder_=small_stage())))
    folder.write("masked_autoencoder", StageRecord(state="done", images_seen=64))
    row = {"step": 1, "images_seen": 64, "time": 1.0, "metrics": {"val/fewshot_pets_5shot": 0.25}}
    (folder.stage("masked_autoencoder") / "metrics.jsonl").write_text(f"{json.dumps(row)}\n")
    (point,) = few_shot_points(read_run(folder), name="mae")
    assert (point.shots, point.images_seen, point.top1) == (5, 64, 0.25)


def test_cost_is_images_seen_times_the_flops_of_a_training_step(tmp_path: Path) -> None:
    run = _run(tmp_path, "a")
    _record(run, "vtab", command="transfer", mean=0.5, results=(_score("probe", 0.375),))
    _record(run, "earlier", command="probe", step=10, images_seen=64, results=(_score("probe", 0.125),))
    points = list(cost_points(run, name="a"))
    flops = account(ModelConfig(**SIZES), image_size=16, num_classes=7, head="mlp").training_flops
    assert {each.exaflops for each in points} == {6400 * flops / 1e18}
    assert {each.hours for each in points} == {1.0}
    assert sorted(each.top1 for each in points) == [0.375, 0.5, 0.75]


def test_of_growing_images_each_costs_what_its_own_size_does(tmp_path: Path) -> None:
    growth = "stages.pretrain.image_size={from: 8, to: 16, over: 50%, steps: 2}"
    run = _run(tmp_path, "a", images_seen=64 * 300, more=(growth,))  # of 800 steps: 200 at 8 pixels, 200 at 12
    _record(run, "vtab", command="transfer", mean=0.5, results=(_score("probe", 0.375),))
    flops = [
        account(ModelConfig(**SIZES), image_size=size, num_classes=7, head="mlp").training_flops for size in (8, 12)
    ]
    points = list(cost_points(run, name="a"))
    assert {each.exaflops for each in points} == {64 * (200 * flops[0] + 100 * flops[1]) / 1e18}


def test_a_run_without_pretraining_cost_nothing(tmp_path: Path) -> None:
    (point,) = cost_points(_run(tmp_path, "scratch", recipe="digits_scratch"), name="scratch")
    assert point.exaflops == 0 and point.top1 == 0.75


@pytest.mark.parametrize("number", [1, 3])
def test_lines_are_runs_over_images_seen(tmp_path: Path, number: int) -> None:
    (_, figure), (_, table) = few_shot_over_size({f"run{each}": _run(tmp_path, f"run{each}") for each in range(number)})
    (panel,) = figure.axes
    assert panel.get_xscale() == "log" and "seen" in panel.get_xlabel()
    assert [line.get_label() for line in panel.get_lines()] == [f"run{each}" for each in range(number)]
    assert panel.get_lines()[0].get_xydata().tolist() == [[3200, 0.25], [6400, 0.5]]
    assert table["top-1, %"][:2] == [25, 50] and len(table["top-1, %"]) == 2 * number
    figure.canvas.draw()
    assert all(label.get_text().endswith(" %") for label in panel.get_yticklabels())


def test_lines_are_models_over_sets_where_the_sets_differ(tmp_path: Path) -> None:
    runs = [
        _run(tmp_path, "small-10", training_images=10, few_shot=(0.1, 0.2)),
        _run(tmp_path, "small-1000", training_images=1000, few_shot=(0.1, 0.4)),
        _run(tmp_path, "large-1000", training_images=1000, few_shot=(0.6,), width=128),
    ]
    (_, figure), _ = few_shot_over_size({run.name: run for run in runs})
    (panel,) = figure.axes
    assert [line.get_xydata().tolist() for line in panel.get_lines()] == [[[10, 0.2], [1000, 0.4]], [[1000, 0.6]]]
    assert "set" in panel.get_xlabel()


def test_transfer_over_cost_is_kept_with_all_its_numbers_in_the_table(tmp_path: Path) -> None:
    runs = [
        _run(tmp_path, "a"),
        _run(tmp_path, "b", images_seen=64000, top1=0.9375),
        _run(tmp_path, "c", width=128),
        _run(tmp_path, "scratch", recipe="digits_scratch", top1=0.5),
    ]
    (picture, figure), (_, table) = transfer_over_cost({run.name: run for run in runs})
    keep_picture(tmp_path, picture, figure=figure, step=0)
    assert [each.picture.name for each in kept_pictures(tmp_path)] == ["transfer_over_cost"]
    assert "b" in picture.alt and "93.8 %" in picture.alt
    assert table["top-1, %"] == [75, 93.75, 75, 50]
    assert table["exaFLOPs"][3] == 0
    assert table["exaFLOPs"][1] == pytest.approx(10 * float(str(table["exaFLOPs"][0])))


def test_nothing_measured_is_no_figure(tmp_path: Path) -> None:
    empty = RunFolder(runs_root=tmp_path, name="empty")
    (tmp_path / "empty").mkdir()
    history = read_run(empty)
    assert [*few_shot_over_size({"a": history}), *transfer_over_cost({"a": history})] == []
    assert [*few_shot_over_size({}), *transfer_over_cost({})] == []


def test_damaged_records_cost_their_points_alone(tmp_path: Path) -> None:
    run = _run(tmp_path, "a")
    stage = run.folder.stage("pretrain")
    (stage / "data.json").write_text('{"sets": 3}')
    record = json.loads((stage / "stage.json").read_text())
    (stage / "stage.json").write_text(json.dumps(record | {"model": {"width": "x"}}))
    again = read_run(run.folder)
    assert {each.training_images for each in few_shot_points(again, name="a")} == {None}
    assert {each.exaflops for each in cost_points(again, name="a")} == {None}
    assert len(list(few_shot_over_size({"a": again}))) == 2 and list(transfer_over_cost({"a": again})) == []

"""The choice: best score, then loss, then order; what failed or is not finite is shown and not chosen."""

import json
import math
from pathlib import Path

import pytest

from shardvit.launch.sweep.record import Outcome, SweepRecord, as_table, choose, failures, outcome
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.runs.run_folder import RunFolder
from tests.small_recipe import small_recipe, small_stage

RECIPE = load_recipe("digits")


def done(name: str, score: float, loss: float) -> Outcome:
    return Outcome(name, {"k": name}, "done", score=score, loss=loss, images=40, seconds=1.0)


@pytest.mark.parametrize(
    ("outcomes", "chosen"),
    [
        ([done("a", 0.5, 1.0), done("b", 0.7, 9.0), done("c", 0.6, 0.1)], "b"),
        ([done("a", 0.7, 1.0), done("b", 0.7, 0.9)], "b"),
        ([done("a", 0.7, 1.0), done("b", 0.7, 1.0)], "a"),
        ([Outcome("a", {}, "failed", score=0.9, loss=0.1), done("b", 0.1, 2.0)], "b"),
        ([Outcome("a", {}, "begun"), Outcome("b", {}, "new"), Outcome("c", {}, "failed")], None),
    ],
)
def test_the_rule(outcomes: list[Outcome], chosen: str | None):
    best = choose(outcomes)
    assert (best.name if best else None) == chosen


def test_a_run_that_ended_has_failed_until_it_is_done(tmp_path: Path):
    folder = RunFolder(runs_root=tmp_path, name="run")
    assert outcome(folder, RECIPE, stage="finetune", values={}).state == "new"
    folder.path.mkdir()
    folder.update("finetune", state="running")
    assert outcome(folder, RECIPE, stage="finetune", values={}).state == "begun"
    assert outcome(folder, RECIPE, stage="finetune", values={}, failed="exit code 1").state == "failed"
    for score, loss, state in (
        (0.5, 1.0, "done"),
        (0.5, math.nan, "failed"),
        (0.5, math.inf, "failed"),
        (math.nan, 1, "failed"),
    ):
        for name in ("val/top1", "val/accuracy"):
            folder.update("finetune", state="done", results={name: score, "val/loss": float(loss)})
            assert outcome(folder, RECIPE, stage="finetune", values={}, failed="exit code 1").state == state


def test_the_file_is_json_and_tells_what_failed(tmp_path: Path):
    failed = Outcome("b", {"k": "b"}, "failed", "exit code 1", score=math.nan, loss=math.inf)
    record = SweepRecord("r", "finetune", 0.1, {"k": ["a", "b"]}, [done("a", 0.5, 1.0), failed], chosen="a")
    record.write(tmp_path)

    def no_constants(text: str) -> None:
        raise AssertionError(text)

    tree = json.loads((tmp_path / "sweep.json").read_text(), parse_constant=no_constants)
    assert tree["chosen"] == "a" and tree["points"][0]["score"] == 0.5 and tree["rule"]
    assert failures(tmp_path) == {"b": "exit code 1"}
    text = as_table(record)
    assert "exit code 1" in text and text.count("chosen") == 1 and "0.5000" in text and "40" in text


def test_a_masked_autoencoder_is_judged_by_its_loss(tmp_path: Path) -> None:
    model = {"width": 16, "depth": 1, "heads": 2, "patch_size": 4}
    recipe = Recipe.model_validate(small_recipe(model=model, masked_autoencoder_=small_stage()))
    found: list[Outcome] = []
    for lr, loss in (("0.1", 0.9), ("0.2", 0.7), ("0.4", 0.5), ("0.8", math.nan)):
        folder = RunFolder(runs_root=tmp_path, name=f"lr-{lr}")
        folder.path.mkdir()
        folder.update("masked_autoencoder", state="done", results={"val/loss": loss, "val/images": 40.0})
        found.append(outcome(folder, recipe, stage="masked_autoencoder", values={"lr": lr}))
    assert [one.state for one in found] == ["done", "done", "done", "failed"]
    best = choose(found)
    assert best is not None and best.name == "lr-0.4" and best.score is None
    record = SweepRecord("r", "masked_autoencoder", 0.1, {"lr": ["0.1", "0.2", "0.4"]}, found[:3], final=best)
    text = as_table(record)
    assert "The best lr, 0.4, lies at the edge" in text and "tie" not in text and "images: loss 0.5000 on" in text


def grid(scores: dict[str, float], *, images: int = 100) -> str:
    """The table of a grid over lr with these scores."""
    points = [
        Outcome(
            *(f"lr-{lr}", {"lr": lr}, "done"),
            score=score,
            loss=1.0,
            images=images,
            balanced_accuracy=score / 2,
            commonest=0.614,
        )
        for lr, score in scores.items()
    ]
    return as_table(SweepRecord("r", "finetune", 0.1, {"lr": list(scores)}, points))


def test_the_table_has_what_a_score_is_to_be_compared_with() -> None:
    text = grid({"0.1": 0.5, "0.2": 0.7, "0.4": 0.6})
    assert "0.3500" in text and "61.4 %" in text
    assert "tie" not in text and "edge" not in text


def test_the_final_score_too_has_what_it_is_to_be_compared_with() -> None:
    final = Outcome("final", {"lr": "0.1"}, "done", score=0.61, loss=1.0, balanced_accuracy=0.51, commonest=0.6)
    text = as_table(SweepRecord("r", "finetune", 0.1, {"lr": ["0.1"]}, [], final=final))
    assert "score 0.6100, balanced accuracy 0.5100, commonest class 0.6000, loss" in text


def test_points_within_the_standard_error_of_the_best_tie() -> None:
    same = grid({"0.1": 0.614, "0.2": 0.614, "0.4": 0.614})
    assert "3 of 3 points tie" in same and "100 images" in same
    near = grid({"0.1": 0.50, "0.2": 0.66, "0.4": 0.70})  # an error of 0.046
    assert "2 of 3 points tie (lr-0.2, lr-0.4)" in near and "0.0460" in near
    assert "tie" not in grid({"0.1": 0.50, "0.2": 0.66, "0.4": 0.70}, images=1000)


def test_a_best_point_at_the_edge_is_told_with_the_value_to_add() -> None:
    assert "edge" not in grid({"0.1": 0.1, "0.2": 0.9, "0.4": 0.1})
    text = grid({"0.1": 0.1, "0.2": 0.2, "0.4": 0.9})
    assert "The best lr, 0.4, lies at the edge" in text and "add 0.8" in text and "--widen" in text


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"points": [{}]}'])
def test_a_damaged_file_tells_nothing(tmp_path: Path, content: str):
    (tmp_path / "sweep.json").write_text(content)
    assert failures(tmp_path) == {}


def test_the_moving_average_is_judged_where_it_becomes_the_model(tmp_path: Path):
    results = {"val/top1": 0.5, "val/loss": 1.0, "val/ema_top1": 0.75, "val/ema_loss": 0.5}
    results |= {"val/balanced_accuracy": 0.25, "val/ema_balanced_accuracy": 0.375, "val/commonest_class_share": 0.4}
    folder = RunFolder(runs_root=tmp_path, name="run")
    folder.path.mkdir()
    folder.update("finetune", state="done", results=results)
    for model, expected in (("ema", (0.75, 0.5, 0.375)), ("weights", (0.5, 1.0, 0.25))):
        recipe = load_recipe("digits", overrides=[f"stages.finetune.ema={{decay: 0.9, model: {model}}}"])
        found = outcome(folder, recipe, stage="finetune", values={})
        assert (found.score, found.loss, found.balanced_accuracy) == expected and found.commonest == 0.4

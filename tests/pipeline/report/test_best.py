"""The best evaluation is named where it was not the last one, and with it how to keep it."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardvit.pipeline.report.best import best_results, describe_best, describe_results
from shardvit.pipeline.runs.logs import MetricRow
from shardvit.pipeline.runs.run_folder import RunFolder

VALUES = st.one_of(st.floats(0, 1), st.just(math.nan))


def rows(values: list[float], *, by: str) -> list[MetricRow]:
    """A curve with an evaluation every second row."""
    found = []
    for number, value in enumerate(values):
        found.append(MetricRow(10 * number + 5, 0, 0.0, {"train/loss": 0.0}))
        found.append(MetricRow(10 * number + 10, 0, 0.0, {by: value, "val/images": 4.0}))
    return found


@given(st.lists(VALUES, min_size=1, max_size=8), st.sampled_from(["val/top1", "val/accuracy", "val/loss"]))
def test_what_is_named_is_better_than_the_last_and_nothing_is_better_than_it(values: list[float], by: str) -> None:
    results = best_results(rows(values, by=by), last={by: values[-1]}, by=by)
    losses = [value if by == "val/loss" else -value for value in values if not math.isnan(value)]
    last = values[-1] if by == "val/loss" else -values[-1]
    if not losses or last == min(losses):
        assert results == {}
        return
    value, step = results[f"best/{by}"], results["best/step"]
    assert values[round(step / 10) - 1] == value
    assert (value if by == "val/loss" else -value) == min(losses)


def test_no_evaluation_no_best() -> None:
    assert best_results([MetricRow(1, 0, 0.0, {"train/loss": 1.0})], last={}, by="val/top1") == {}
    assert describe_best({"val/top1": 0.5}, stage="pretrain", checkpoints=Path("x")) == ""


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("val/top1", "score"),
        ("val/accuracy", "score"),
        ("val/loss", "loss"),
        ("val/ema_top1", "score"),
        ("val/ema_loss", "loss"),
    ],
)
def test_the_sentence_has_step_and_value_and_where_it_is_or_how_to_keep_it(tmp_path: Path, key: str, word: str) -> None:
    results = {key: 0.529, "best/step": 1400.0, f"best/{key}": 0.627}
    text = describe_best(results, stage="finetune", checkpoints=tmp_path)
    assert "0.6270" in text and "step 1,400" in text
    assert f"keep_best: {word}" in text and "stages.finetune" in text and "--restart finetune" in text
    (tmp_path / "step-00001400").mkdir()
    text = describe_best(results, stage="finetune", checkpoints=tmp_path)
    assert str(tmp_path / "step-00001400") in text and "keep_best" not in text


@pytest.mark.parametrize(
    ("results", "parts"),
    [
        ({"val/top1": 0.75}, ["held-out top-1 0.7500 after 64 images"]),
        (
            {"val/top1": 0.5, "val/ema_top1": 0.625, "val/balanced_accuracy": 0.25}
            | {"val/ema_balanced_accuracy": 0.375, "val/commonest_class_share": 0.4375},
            [
                "0.5000 (balanced accuracy 0.2500, commonest class 0.4375)",
                "0.6250 (balanced accuracy 0.3750, commonest class 0.4375) with the moving average",
            ],
        ),
        ({"val/top1": 0.529, "best/step": 400.0, "best/val/top1": 0.627}, ["0.5290", "0.6270", "step 400"]),
        ({}, [""]),
    ],
)
def test_a_finished_stage_has_its_score_its_averages_and_a_better_one(
    tmp_path: Path, results: dict[str, float], parts: list[str]
) -> None:
    folder = RunFolder(runs_root=tmp_path, name="a")
    folder.path.mkdir()
    folder.update("pretrain", state="done", images_seen=64, results=results)
    text = describe_results(folder, stage="pretrain")
    assert all(part in text for part in parts) and bool(text) == bool(results)

"""An evaluation is read back to the last bit; the newest two of a set stay; what is torn or hostile is refused."""

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardvit.pipeline.runs.evaluations import (
    Calibration,
    Evaluation,
    Judged,
    PerClass,
    evaluated_step,
    evaluations,
    load_evaluation,
    save_evaluation,
)

CLASSES = ("<b>ant</b>", "b\x1b[31mee", "c\udcff$x_1$")


def evaluation(*, name: str = "val") -> Evaluation:
    images, right = np.array([3, 1, 0]), np.array([2, 0, 0])
    with np.errstate(invalid="ignore"):
        accuracy = right / images
    judged = Judged(7, "k\udc80", (0,), 2, 1 / 3, 0.1, ((2, 1 / 3), (0, 0.1)))
    return Evaluation(
        set_name=name,
        classes=CLASSES,
        label_kind="single",
        images=4,
        metrics={"val/top1": 0.5, "val/loss": math.pi},
        per_class=PerClass(images, right, accuracy, answers=np.array([2, 1, 1])),
        confusion=np.array([[2, 0, 1], [1, 0, 0], [0, 0, 0]]),
        calibration=Calibration(np.linspace(0, 1, 16), np.full(15, np.nan), np.full(15, 1 / 7), np.arange(15)),
        mistakes=(judged,),
        examples=(judged, replace(judged, true=(), probability_of_true=math.nan)),
    )


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
    if isinstance(left, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(same, left, right))
    if hasattr(left, "__dataclass_fields__"):
        return type(left) is type(right) and same(list(vars(left).values()), list(vars(right).values()))
    return left == right


def test_what_was_saved_is_read_back_to_the_last_bit(tmp_path: Path):
    for whole in (
        evaluation(),
        replace(evaluation(), confusion=None, calibration=None, label_kind="multi", weights="ema"),
        replace(
            evaluation(), per_class=replace(evaluation().per_class, average_precision=np.array([1 / 3, 0, np.nan]))
        ),
    ):
        assert same(load_evaluation(save_evaluation(tmp_path, whole, step=400)), whole)


def test_of_each_set_the_newest_two_stay_and_none_of_steps_that_were_gone_back_from(tmp_path: Path):
    for step in (100, 200, 300):
        save_evaluation(tmp_path, evaluation(), step=step)
    save_evaluation(tmp_path, evaluation(name="other"), step=100)

    def steps() -> dict[str, list[int]]:
        return {name: [evaluated_step(each) for each in found] for name, found in evaluations(tmp_path).items()}

    assert steps() == {"other": [100], "val": [200, 300]}
    save_evaluation(tmp_path, evaluation(), step=250)
    assert steps() == {"other": [100], "val": [200, 250]}
    save_evaluation(tmp_path, evaluation(), step=250)
    assert steps()["val"] == [200, 250]


def test_a_folder_that_was_being_written_is_not_found(tmp_path: Path):
    folder = save_evaluation(tmp_path, evaluation(), step=100)
    (folder / "evaluation.json").rename(folder / "evaluation.js")
    (folder.parent / ".step-00000200.writing").mkdir()
    assert evaluations(tmp_path) == {} == evaluations(tmp_path / "nothing")
    assert evaluations(tmp_path.parent / "missing") == {}


def test_a_stage_folder_that_is_gone_is_not_made_anew(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        save_evaluation(tmp_path / "gone", evaluation(), step=1)
    assert not (tmp_path / "gone").exists()


def hostile_pickle(folder: Path) -> None:
    np.savez(folder / "arrays.npz", **{"per_class.images": np.array([Bomb()], dtype=object)})


class Bomb:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("a pickle was run",))


def swollen(folder: Path) -> None:
    np.savez_compressed(folder / "arrays.npz", confusion=np.zeros((2000, 2000), dtype=np.int64))


def with_record(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        file = folder / "evaluation.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


BROKEN = {
    "pickle": hostile_pickle,
    "bare pickle": lambda folder: (folder / "arrays.npz").write_bytes(pickle.dumps([1])),
    "too large": swollen,
    "no arrays": lambda folder: (folder / "arrays.npz").unlink(),
    "torn record": lambda folder: (folder / "evaluation.json").write_text("{"),
    "a list": lambda folder: (folder / "evaluation.json").write_text("[]"),
    "another format": with_record(format=99),
    "fewer classes": with_record(classes=["a"]),
    "unknown labels": with_record(label_kind="x"),
    "a class that is not": with_record(mistakes=[{**vars(evaluation().mistakes[0]), "true": [3]}]),
    "metrics that are no numbers": with_record(metrics={"val/top1": "x"}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_damaged_or_hostile_is_refused_with_a_sentence(name: str, tmp_path: Path):
    folder = save_evaluation(tmp_path, evaluation(), step=100)
    BROKEN[name](folder)
    with pytest.raises(ValueError, match="step-00000100") as caught:
        load_evaluation(folder)
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)

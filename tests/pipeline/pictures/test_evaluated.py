"""The numbers drawn of an evaluation are those of its record, and no record, class name or failure spoils a picture."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from sklearn.calibration import calibration_curve
from torchmetrics.functional.classification import multiclass_calibration_error

from shardvit.pipeline.evaluation.scores import calibration_error
from shardvit.pipeline.pictures.accuracy import (
    class_scores,
    draw_per_class,
    draw_per_class_table,
    draw_reliability,
    wilson_interval,
)
from shardvit.pipeline.pictures.confusion import (
    confused_pairs,
    draw_confused_pairs,
    draw_confusion_matrix,
    in_blocks,
    row_shares,
    similar_order,
)
from shardvit.pipeline.pictures.drawing import Drawer, draw, drawers
from shardvit.pipeline.pictures.style import keep_drawn
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.runs import pictures as picture_module
from shardvit.pipeline.runs.evaluations import Evaluation, PerClass, save_evaluation
from shardvit.pipeline.runs.pictures import DrawRequest, KeptPicture, kept_pictures
from shardvit.pipeline.runs.run_folder import RunFolder
from tests.pipeline.pictures.evaluated_sets import HOSTILE, evaluation_of, random_evaluation

STEP = 400
DRAWERS = (draw_confused_pairs, draw_confusion_matrix, draw_reliability, draw_per_class, draw_per_class_table)
NAMES = tuple(f"class {number}" for number in range(1000))


@pytest.fixture
def request_(tmp_path: Path) -> DrawRequest:
    folder = RunFolder(runs_root=tmp_path, name="digits")
    (folder.path / "pretrain").mkdir(parents=True)
    return DrawRequest(folder, load_recipe("digits"), "pretrain", STEP)


def drawn(request: DrawRequest, evaluation: Evaluation, *which: Drawer) -> dict[str, KeptPicture]:
    save_evaluation(request.stage_folder, evaluation, step=request.step)
    for each in which or DRAWERS:
        keep_drawn(request, each(request))
    return {each.picture.name: each for each in kept_pictures(request.stage_folder)}


def texts(kept: KeptPicture) -> list[str]:
    """Of the SVG, in its order."""
    assert kept.svg is not None
    root = ElementTree.fromstring(kept.svg.read_text(encoding="utf-8"))
    return ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize(("classes", "images", "most"), [(2, 40, 5), (7, 300, 12), (40, 4000, 1600)])
def test_confused_pairs_are_the_largest_entries_beside_the_diagonal(classes: int, images: int, most: int) -> None:
    confusion = random_evaluation(classes=NAMES[:classes], images=images).confusion
    assert confusion is not None
    pairs = confused_pairs(confusion, most=most)
    everything = sorted(
        (-confusion[row, column], -confusion[row, column] / confusion[row].sum(), row, column)
        for row in range(classes)
        for column in range(classes)
        if row != column and confusion[row, column]
    )
    assert [(each.true, each.predicted) for each in pairs] == [(row, column) for *_, row, column in everything[:most]]
    assert [(each.images, each.share) for each in pairs] == [(-count, -share) for count, share, *_ in everything[:most]]


def test_the_order_of_a_matrix_is_a_permutation_that_brings_the_confused_together() -> None:
    draw = np.random.default_rng(1)
    group = draw.permutation(60) // 6  # ten groups of six, scattered
    together = group[:, None] == group[None]
    confusion = np.where(together, draw.integers(1, 9, (60, 60)), 0) + 60 * np.eye(60, dtype=np.int64)
    confusion[5] = 0  # a class without images
    order = similar_order(confusion)
    assert sorted(order) == list(range(60))
    assert sum(group[order][1:] != group[order][:-1]) == 9
    np.testing.assert_array_equal(order, similar_order(confusion))
    for alone in (np.diag([3, 0, 4, 1]), np.zeros((5, 5), dtype=np.int64), np.array([[2]]), np.array([[2, 1], [0, 1]])):
        np.testing.assert_array_equal(similar_order(alone), np.arange(len(alone)))


@pytest.mark.parametrize(
    ("classes", "most", "cells", "size"), [(10, 150, 10, 1), (151, 150, 76, 2), (1000, 150, 143, 7)]
)
def test_neighbours_are_summed_into_cells_and_nothing_is_lost(classes: int, most: int, cells: int, size: int) -> None:
    confusion = np.random.default_rng(0).integers(0, 9, (classes, classes))
    blocks, by = in_blocks(confusion, most=most)
    assert blocks.shape == (cells, cells) and by == size
    expected = [
        [confusion[row : row + by, column : column + by].sum() for column in range(0, classes, by)]
        for row in range(0, classes, by)
    ]
    np.testing.assert_array_equal(blocks, expected)


def test_the_calibration_error_is_that_of_torchmetrics_and_the_points_are_scikit_learns() -> None:
    draw = np.random.default_rng(3)
    true, shares = draw.integers(0, 4, 500), draw.dirichlet([0.7] * 4, 500)
    calibration = evaluation_of(true, shares, classes=NAMES[:4]).calibration
    assert calibration is not None
    theirs = multiclass_calibration_error(torch.from_numpy(shares), torch.from_numpy(true), 4, n_bins=15, norm="l1")
    assert calibration_error(calibration) == pytest.approx(theirs.item(), abs=1e-6)
    right, sure = calibration_curve(shares.argmax(axis=1) == true, shares.max(axis=1), n_bins=15)
    filled = calibration.images > 0
    np.testing.assert_allclose(calibration.accuracy[filled], right)
    np.testing.assert_allclose(calibration.confidence[filled], sure)


@pytest.mark.parametrize(("right", "images"), [(0, 1), (1, 1), (3, 7), (99, 100), (5000, 9000)])
def test_intervals_are_scipys(right: int, images: int) -> None:
    theirs = binomtest(right, images).proportion_ci(method="wilson")
    ours = wilson_interval(np.array([right / images]), np.array([images]))
    np.testing.assert_allclose(np.ravel(ours), [theirs.low, theirs.high], atol=1e-4)


def test_the_numbers_in_the_pictures_are_the_records(request_: DrawRequest) -> None:
    evaluation = random_evaluation(classes=("ant", "bee", "cat", "dog", "eel"), images=400)
    kept = drawn(request_, evaluation)
    confusion = evaluation.confusion
    assert confusion is not None
    shares = 100 * row_shares(confusion)
    cells = [("< 1" if value < 0.5 else f"{value:.0f}") for value in shares.ravel() if value > 0]
    assert [text for text in texts(kept["confusion_matrix"]) if text in cells] == cells
    off = confusion * ~np.eye(5, dtype=bool)
    row, column = np.unravel_index(off.argmax(), off.shape)
    bars = texts(kept["confused_pairs"])
    assert f"{evaluation.classes[row]} → {evaluation.classes[column]}" in bars
    assert f"{off.max()} images" in bars and f"{100 * off.max() / confusion[row].sum():.1f} %" in bars
    assert str(off.max()) in kept["confused_pairs"].picture.alt
    assert evaluation.calibration is not None
    error = f"{100 * calibration_error(evaluation.calibration):.1f} %"
    assert f"Calibration error {error}" in texts(kept["reliability"])
    assert error in kept["reliability"].picture.title and error in kept["reliability"].picture.alt
    assert f"mean {100 * evaluation.per_class.accuracy.mean():.1f} %" in texts(kept["class_scores"])


def test_the_table_has_all_classes_worst_first(request_: DrawRequest) -> None:
    evaluation = random_evaluation(classes=NAMES[:50], images=600)
    counts = evaluation.per_class.images.copy()
    table = drawn(request_, evaluation, draw_per_class_table)["per_class"].table
    assert table is not None
    accuracy = dict(zip(NAMES, evaluation.per_class.accuracy, strict=False))
    images = dict(zip(NAMES, counts.tolist(), strict=False))
    assert sorted(table["class"]) == sorted(NAMES[:50])
    assert table["images"] == [images[name] for name in table["class"]]
    assert table["accuracy, %"] == [round(100 * accuracy[name], 2) for name in table["class"]]
    assert table["accuracy, %"] == sorted(table["accuracy, %"])
    assert evaluation.confusion is not None
    for name, other, share in zip(*(list(table.values())[at] for at in (0, 3, 4)), strict=True):
        row = evaluation.confusion[NAMES.index(name)] * (np.arange(50) != NAMES.index(name))
        assert (other == "" and not row.any()) or row[NAMES.index(other)] == row.max()
        assert share is None or share == round(100 * row.max() / counts[NAMES.index(name)], 2)


def test_classes_without_images_stand_last_and_have_no_score() -> None:
    evaluation = evaluation_of([0, 0, 3, 3], np.eye(5)[[0, 3, 3, 3]], classes=NAMES[:5])
    scores = class_scores(evaluation)
    assert [each.number for each in scores] == [0, 3, 1, 2, 4]
    assert [each.images for each in scores] == [2, 2, 0, 0, 0]
    assert np.isnan([each.score for each in scores[2:]]).all()
    assert (scores[0].confused_with, scores[0].confused_share) == (3, 0.5) and scores[1].confused_with is None


def several_labels(*, with_precision: bool) -> Evaluation:
    one = random_evaluation(classes=NAMES[:6], images=80)
    precision = np.array([0.5, 0.25, np.nan, 1.0, 0.75, 0.0]) if with_precision else None
    images = np.array([9, 30, 0, 2, 44, 5])
    right = np.array([4, 11, 0, 2, 40, 0])
    per_class = PerClass(images, right, np.divide(right, images, out=np.full(6, np.nan), where=images > 0), precision)
    judged = replace(one.examples[0], true=(1, 4), predicted=4)
    unlabelled = replace(one.examples[1], true=(), probability_of_true=np.nan)
    return replace(
        one,
        label_kind="multi",
        confusion=None,
        calibration=None,
        per_class=per_class,
        examples=(judged, unlabelled),
        mistakes=(unlabelled,),
    )


def test_images_with_several_labels_have_the_pictures_that_make_sense(request_: DrawRequest) -> None:
    kept = drawn(request_, several_labels(with_precision=True))
    assert set(kept) == {"class_scores", "per_class"}
    table = kept["per_class"].table
    assert table is not None and list(table) == ["class", "images", "average precision, %", "right, %"]
    assert table["average precision, %"] == [0, 25, 50, 75, 100, None]
    kept = drawn(request_, several_labels(with_precision=False))
    table = kept["per_class"].table
    assert table is not None and list(table) == ["class", "images", "accuracy, %"]


def empty() -> Evaluation:
    return evaluation_of([], np.zeros((0, 3)), classes=NAMES[:3])


ODD: dict[str, Callable[[], Evaluation]] = {
    "one class": lambda: random_evaluation(classes=("only",), images=5),
    "no mistakes": lambda: evaluation_of([0, 1, 2] * 3, np.eye(3)[[0, 1, 2] * 3], classes=NAMES[:3]),
    "all wrong": lambda: evaluation_of([0, 1, 2] * 30, np.eye(3)[[1, 2, 0] * 30], classes=NAMES[:3]),
    "one image": lambda: evaluation_of([0], np.array([[0.2, 0.7, 0.1]]), classes=NAMES[:3]),
    "classes without images": lambda: random_evaluation(classes=NAMES[:30], images=9),
    "all damaged": empty,
    "hostile": lambda: random_evaluation(classes=HOSTILE, images=300),
    "two hostile": lambda: random_evaluation(classes=HOSTILE[3:7:3], images=30),
    "hostile, named in part": lambda: random_evaluation(classes=HOSTILE * 5, images=900),
    "many": lambda: random_evaluation(classes=NAMES[:200], images=900, skill=2),
    "no matrix": lambda: replace(random_evaluation(classes=NAMES[:60], images=99), confusion=None, calibration=None),
}
EXPECTED = {
    "one class": {"reliability", "per_class"},
    "no mistakes": {"confusion_matrix", "reliability", "class_scores", "per_class"},
    "one image": {"confusion_matrix", "confused_pairs", "reliability", "per_class"},
    "all damaged": {"per_class"},
    "no matrix": {"class_scores", "per_class"},
}


@pytest.mark.parametrize("kind", ODD)
def test_every_record_makes_whole_pictures_and_no_empty_one(kind: str, request_: DrawRequest) -> None:
    kept = drawn(request_, ODD[kind]())
    assert set(kept) == EXPECTED.get(
        kind, {"confusion_matrix", "confused_pairs", "reliability", "class_scores", "per_class"}
    )
    for each in kept.values():
        assert each.picture.alt and each.picture.caption and "\n" not in each.picture.alt
        if each.table is None:
            assert each.png is not None and each.png.read_bytes().startswith(b"\x89PNG")
            assert each.svg is not None
            svg = each.svg.read_text(encoding="utf-8")
            assert "<script" not in svg and "\x1b" not in svg and len(svg) < 1_000_000
            assert texts(each)


def test_a_hostile_name_stands_in_the_picture_as_text(request_: DrawRequest) -> None:
    kept = drawn(request_, random_evaluation(classes=HOSTILE, images=300), draw_per_class)
    shown = "\n".join(texts(kept["class_scores"]))
    assert "<script>alert(1)</script>"[:15] in shown and r"$\frac$" in shown and r"a\x1b[2J\x00\nb" in shown
    assert "😀🫠" in shown and "x" * 100 not in shown and r"c\udcff" in shown


def test_several_sets_have_pictures_of_their_own(request_: DrawRequest) -> None:
    evaluation = random_evaluation(classes=NAMES[:4], images=50)
    save_evaluation(request_.stage_folder, evaluation, step=STEP)
    save_evaluation(request_.stage_folder, replace(evaluation, set_name="ImageNet-v2"), step=STEP)
    save_evaluation(request_.stage_folder, replace(evaluation, set_name="older"), step=STEP - 1)
    keep_drawn(request_, draw_confusion_matrix(request_))
    first, other = kept_pictures(request_.stage_folder)
    assert (first.picture.name, other.picture.name) == ("confusion_matrix", "confusion_matrix__imagenet_v2")
    assert "ImageNet-v2" in other.picture.title and "ImageNet-v2" not in first.picture.title


def test_a_set_that_cannot_be_read_costs_its_own_pictures_alone(request_: DrawRequest) -> None:
    evaluation = random_evaluation(classes=NAMES[:4], images=50)
    broken = save_evaluation(request_.stage_folder, evaluation, step=STEP)
    save_evaluation(request_.stage_folder, replace(evaluation, set_name="other"), step=STEP)
    (broken / "arrays.npz").write_bytes(b"PK torn")
    with pytest.raises(ValueError, match="no evaluation that can be read"):
        keep_drawn(request_, draw_confusion_matrix(request_))
    assert [each.picture.name for each in kept_pictures(request_.stage_folder)] == ["confusion_matrix__other"]


@pytest.mark.parametrize("file", ["png", "svg", "json"])
def test_a_drawer_that_fails_leaves_no_half_picture(
    file: str, request_: DrawRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Any = picture_module.replaced

    def full(path: Path, **how: Any) -> Any:
        if path.suffix == f".{file}":
            raise OSError(28, "No space left on device")
        return real(path, **how)

    monkeypatch.setattr(picture_module, "replaced", full)
    save_evaluation(request_.stage_folder, random_evaluation(classes=NAMES[:4], images=50), step=STEP)
    said: list[str] = []
    draw(request_, moment="evaluated", say=said.append)
    assert sum("No space left" in line for line in said) >= 4
    assert [each.table is not None for each in kept_pictures(request_.stage_folder)] == [True] * (file != "json")
    left = [each.name for each in (request_.stage_folder / "pictures").rglob("*") if each.is_file()]
    assert not [name for name in left if name.startswith(".")], left


def test_all_of_these_are_drawn_after_an_evaluation() -> None:
    assert set(DRAWERS) <= set(drawers("evaluated"))


def test_the_readme_names_them_all(request_: DrawRequest) -> None:
    text = (Path(__file__).parents[3] / "docs" / "looking-at-runs.md").read_text(encoding="utf-8")
    first_cells = [
        line.split("|")[1] for line in text.partition("## Pictures")[2].splitlines() if line.startswith("| `")
    ]
    for name in (
        *drawn(request_, random_evaluation(classes=NAMES[:3], images=30)),
        "evaluation_grid",
        "worst_mistakes",
    ):
        assert any(f"`{name}`" in cell for cell in first_cells), name

"""Metrics equal scikit-learn's and torchmetrics', and a direct computation, on random logits and their ties."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as oracle
from torchmetrics.functional import classification as library

from shardvit.model.loss import image_losses, loss_function, probabilities
from shardvit.model.vocabulary import LossKind
from shardvit.pipeline.evaluation import scores
from shardvit.pipeline.evaluation.scores import Answered, average_precision, one_answer
from shardvit.pipeline.runs.evaluations import Evaluation, PerClass
from shardvit.pipeline.stage.task import answers

IMAGES, CLASSES = 400, 12


def logits(*, ties: bool = False, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(IMAGES, CLASSES, generator=torch.Generator().manual_seed(seed)) * 3
    return drawn.round() if ties else drawn


def labels() -> torch.Tensor:
    return torch.randint(0, CLASSES - 1, (IMAGES,), generator=torch.Generator().manual_seed(7))  # none of the last


def answered(given: torch.Tensor, wanted: torch.Tensor, *, kind: LossKind = "softmax") -> Answered:
    found = answers(given, wanted, kind=kind)
    double: dict[str, Any] = {
        "loss": image_losses(given, wanted, kind=kind),
        "right": found.rank == 0,
        "predictions": torch.ones(len(given)),
        "probability": found.probabilities[:, 0],
        "probability_of_true": found.probability_of_true,
    }
    return Answered(
        sample=np.arange(len(given)),
        rank=found.rank.numpy(),
        true=found.true.numpy(),
        predicted=found.top[:, 0].numpy(),
        **{name: value.double().numpy() for name, value in double.items()},
    )


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("k", [1, 5])
def test_top_k_is_scikit_learns_and_ties_go_to_the_first_class(k: int, ties: bool):
    given, wanted = logits(ties=ties), labels()
    ours = scores.top_share(answered(given, wanted), k=k)
    # scikit-learn gives ties to the last class: turned around, to the first.
    turned = oracle.top_k_accuracy_score(
        CLASSES - 1 - wanted.numpy(), given.flip(1).numpy(), k=k, labels=np.arange(CLASSES)
    )
    assert ours == turned
    if not ties:
        assert ours == pytest.approx(
            library.multiclass_accuracy(given, wanted, CLASSES, top_k=k, average="micro").item(), abs=1e-6
        )


def test_counts_of_classes_and_the_confusion_matrix_are_scikit_learns():
    given, wanted = logits(ties=True), labels()
    ours = answered(given, wanted)
    best = given.argmax(dim=1)
    expected = oracle.confusion_matrix(wanted, best, labels=range(CLASSES))
    assert np.array_equal(scores.confusion_matrix(ours, num_classes=CLASSES), expected)
    classes = scores.per_class(ours, num_classes=CLASSES)
    assert np.array_equal(classes.images, expected.sum(1)) and np.array_equal(classes.right, expected.diagonal())
    assert math.isnan(classes.accuracy[-1]) and scores.balanced_accuracy(classes) == pytest.approx(
        oracle.recall_score(wanted, best, labels=range(CLASSES - 1), average="macro")
    )
    assert np.array_equal(expected, library.multiclass_confusion_matrix(given, wanted, CLASSES).numpy())
    assert scores.confusion_matrix(ours, num_classes=1001) is None


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_calibration_error_is_torchmetrics_and_a_direct_computation(kind: LossKind):
    given, wanted = logits(), labels()
    shares = probabilities(given, kind)
    confidence, best = shares.max(dim=1)
    right = (best == wanted).numpy()
    found = scores.calibration(answered(given, wanted, kind=kind))
    direct = 0.0
    for number, (lower, upper) in enumerate(zip(found.edges[:-1], found.edges[1:], strict=True)):
        inside = ((confidence.double() > lower) & (confidence.double() <= upper)).numpy()
        assert found.images[number] == inside.sum()
        if inside.any():
            assert found.accuracy[number] == pytest.approx(right[inside].mean())
            direct += abs(right[inside].mean() - confidence.double().numpy()[inside].mean()) * inside.sum()
        else:
            assert math.isnan(found.accuracy[number]) and math.isnan(found.confidence[number])
    assert scores.calibration_error(found) == pytest.approx(direct / IMAGES, rel=1e-12)
    if kind == "softmax":
        theirs = library.multiclass_calibration_error(given, wanted, CLASSES, n_bins=15, norm="l1")
        assert scores.calibration_error(found) == pytest.approx(theirs.item(), abs=1e-6)


def test_a_certain_prediction_is_in_the_last_bin_and_an_empty_set_has_no_metrics():
    given = torch.tensor([[200.0, 0.0]])
    assert scores.calibration(answered(given, torch.tensor([0]))).images.tolist() == [0] * 14 + [1]
    nothing = answered(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    assert math.isnan(scores.mean_loss(nothing)) and math.isnan(scores.top_share(nothing, k=1))
    assert math.isnan(scores.calibration_error(scores.calibration(nothing)))
    assert math.isnan(scores.balanced_accuracy(scores.per_class(nothing, num_classes=3)))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_the_mean_of_the_images_losses_is_the_loss_of_training(kind: LossKind):
    given, wanted = logits(), labels()
    expected = loss_function(kind)(given, wanted).item()
    assert scores.mean_loss(answered(given, wanted, kind=kind)) == pytest.approx(expected, rel=1e-6)
    table = torch.nn.functional.one_hot(wanted, CLASSES).float()
    assert torch.equal(image_losses(given, wanted, kind="sigmoid"), image_losses(given, table, kind="sigmoid"))


def test_an_image_with_a_score_that_is_nan_is_never_right():
    given = logits()
    given[0], given[1, 3] = math.nan, math.nan
    wanted = given.nan_to_num(-100).argmax(dim=1)
    assert answers(given, wanted, kind="softmax").rank[:3].tolist() == [CLASSES, CLASSES, 0]


@pytest.mark.parametrize("ties", [False, True])
def test_average_precision_is_scikit_learns_and_torchmetrics_also_of_large_logits(ties: bool):
    given = logits(ties=ties)
    wanted = torch.rand(IMAGES, CLASSES, generator=torch.Generator().manual_seed(3)) < 0.2
    ours = [average_precision(given[:, each].numpy(), positive=wanted[:, each].numpy()) for each in range(CLASSES)]
    expected = oracle.average_precision_score(wanted.numpy(), given.numpy(), average=None)
    assert ours == pytest.approx(list(expected), abs=2e-6)
    theirs = library.multilabel_average_precision(given.sigmoid(), wanted.long(), CLASSES, average=None)
    assert ours == pytest.approx(theirs.tolist(), abs=2e-6)
    large = [
        average_precision(np.asarray(given[:, each] * 1000), positive=np.asarray(wanted[:, each]))
        for each in range(CLASSES)
    ]
    assert large == ours
    order = torch.randperm(IMAGES)
    assert average_precision(np.asarray(given[order, 0]), positive=np.asarray(wanted[order, 0])) == ours[0]
    assert math.isnan(
        average_precision(np.asarray(given[:, 0]), positive=np.asarray(torch.zeros(IMAGES, dtype=torch.bool)))
    )


def test_the_worst_mistakes_are_the_most_confident_and_equal_ones_come_in_the_sets_order():
    given = torch.tensor([[0.0, 3], [0, 1], [5, 0], [0, 3], [0, 9]])
    assert scores.worst(answered(given, torch.tensor([0, 0, 0, 0, 1])), count=2).tolist() == [0, 3]


def evaluated(images: Sequence[int], answers: Sequence[int], *, set_name: str = "val") -> Evaluation:
    """Of so many images of each class, and so many answers."""
    counts = np.array(images)
    return Evaluation(
        set_name=set_name,
        classes=("cat", "do\x1bg", "owl"),
        label_kind="single",
        images=int(counts.sum()),
        metrics={"val/loss": 1.0},
        per_class=PerClass(counts, counts, np.ones(3), answers=np.array(answers)),
        confusion=None,
        calibration=None,
        mistakes=(),
        examples=(),
    )


@pytest.mark.parametrize(
    ("images", "answers", "warns"),
    [
        ([30, 30, 40], [0, 0, 100], True),
        ([30, 30, 40], [100, 0, 0], True),  # not even the commonest
        ([30, 30, 40], [5, 0, 95], True),
        ([30, 30, 40], [6, 0, 94], False),
        ([0, 3, 97], [0, 3, 97], False),  # the images are like that
        ([0, 3, 97], [0, 0, 100], True),
        ([0, 0, 100], [0, 0, 100], False),
        ([0, 0, 0], [0, 0, 0], False),
    ],
)
def test_nearly_all_answers_are_one_class(images: list[int], answers: list[int], warns: bool) -> None:
    assert bool(one_answer(evaluated(images, answers))) == warns


def test_the_warning_names_class_and_counts_and_nothing_hostile() -> None:
    text = one_answer(evaluated([20, 1214, 766], [0, 2000, 0]))
    assert "2,000 of 2,000" in text and "60.7 %" in text and "held-out" in text
    assert "\x1b" not in text and "g'" in text
    assert "new" in one_answer(evaluated([1, 1, 0], [2, 0, 0], set_name="new"))


def test_numbers_that_are_not_finite_and_older_evaluations_are_no_answers() -> None:
    one = evaluated([5, 5, 0], [10, 0, 0])
    assert one_answer(one)
    assert not one_answer(replace(one, metrics={"val/loss": math.nan}))
    assert not one_answer(replace(one, per_class=replace(one.per_class, answers=None)))

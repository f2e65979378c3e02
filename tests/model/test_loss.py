"""`model.loss`: laws that need no other library (values are compared with optax's in tests/oracles)."""

import math

import pytest
import torch
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch.nn import functional as F

from shardvit.model.loss import loss_function
from shardvit.model.vocabulary import LossKind

KINDS: list[LossKind] = ["softmax", "sigmoid", "bce"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_indices_and_one_hot_rows_are_the_same_targets(kind: LossKind, label_smoothing: float) -> None:
    loss = loss_function(kind, label_smoothing=label_smoothing)
    logits, indices = torch.randn(6, 5), torch.tensor([0, 4, 2, 2, 1, 3])
    torch.testing.assert_close(loss(logits, indices), loss(logits, F.one_hot(indices, 5).float()))


def test_zero_logits_cost_what_ignorance_costs() -> None:
    logits, indices = torch.zeros(3, 7), torch.tensor([0, 1, 2])
    assert loss_function("softmax")(logits, indices).item() == pytest.approx(math.log(7))
    # the sum over the classes, not their mean
    assert loss_function("sigmoid")(logits, indices).item() == pytest.approx(7 * math.log(2))


def test_sigmoid_smoothing_is_on_and_off_values_of_each_class() -> None:
    logits, indices = torch.randn(4, 6), torch.tensor([5, 0, 3, 3])
    smoothed = torch.where(F.one_hot(indices, 6).bool(), 0.9999, 0.0001)
    torch.testing.assert_close(
        loss_function("sigmoid", label_smoothing=1e-4)(logits, indices),
        loss_function("sigmoid")(logits, smoothed),
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("threshold", [None, 0.0, 0.2])
def test_bce_is_timms_on_labels_and_on_mixed_ones(smoothing: float, threshold: float | None) -> None:
    ours = loss_function("bce", label_smoothing=smoothing, target_threshold=threshold)
    logits, indices = torch.randn(6, 9) * 3, torch.tensor([5, 0, 3, 3, 8, 1])
    theirs = BinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold)
    torch.testing.assert_close(ours(logits, indices), theirs(logits, indices), rtol=1e-6, atol=0)
    for weight in (1.0, 0.85, 0.3):
        smoothed, plain = (mixup_target(indices, 9, weight, smoothing=each) for each in (smoothing, 0.0))
        torch.testing.assert_close(ours(logits, plain), theirs(logits, smoothed), rtol=1e-6, atol=0)


def test_deit_3s_loss_counts_each_class_of_a_mixed_image_in_full() -> None:
    """facebookresearch/deit, engine.py and main.py: `BCEWithLogitsLoss` of the targets above 0."""
    logits, indices = torch.randn(4, 6), torch.tensor([5, 0, 3, 3])
    mixed = mixup_target(indices, 6, 0.999, smoothing=0.0)
    expected = torch.nn.BCEWithLogitsLoss()(logits, (mixed > 0).float())
    torch.testing.assert_close(loss_function("bce", target_threshold=0.0)(logits, mixed), expected)


@pytest.mark.parametrize("weight", [1.0, 0.7, 0.2])
def test_smoothing_mixed_labels_is_timms_mixing_of_smoothed_ones(weight: float) -> None:
    logits, indices = torch.randn(6, 9) * 3, torch.tensor([5, 0, 3, 3, 8, 1])
    expected = SoftTargetCrossEntropy()(logits, mixup_target(indices, 9, weight, smoothing=0.1))
    ours = loss_function("softmax", label_smoothing=0.1)(logits, mixup_target(indices, 9, weight))
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)


def _in_float64(kind: LossKind, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The definitions, in the plainest form that does not overflow."""
    logits, rows = logits.double(), rows.double()
    if kind == "softmax":
        return (rows * (logits.logsumexp(dim=1, keepdim=True) - logits)).sum(dim=1).mean()
    of_classes = logits.clamp(min=0) - logits * rows + torch.log1p(torch.exp(-logits.abs()))
    return (of_classes.sum(dim=1) if kind == "sigmoid" else of_classes.mean(dim=1)).mean()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "rounding", "smallest"), [(torch.bfloat16, 2**-8, 0.0), (torch.float16, 2**-11, 2**-24)]
)
@pytest.mark.parametrize("targets", ["indices", "mixed", "several"])
def test_half_precision_logits_of_100_give_the_loss_and_gradient_of_float64(
    kind: LossKind, dtype: torch.dtype, rounding: float, smallest: float, targets: str
) -> None:
    """The loss to float32's accuracy; the gradient to the resolution of the dtype that it comes back in."""
    generator = torch.Generator().manual_seed(3)
    sign = torch.randint(-1, 2, (8, 200), generator=generator)
    logits = (100 * sign + torch.randn(8, 200, generator=generator)).to(dtype).requires_grad_()
    indices = torch.randint(0, 200, (8,), generator=generator)
    one_hot = F.one_hot(indices, 200).float()
    ours: torch.Tensor
    match targets:
        case "indices":
            ours, rows = indices, one_hot
        case "mixed":
            ours = rows = 0.25 * one_hot + 0.75 * one_hot.roll(1, dims=0)
        case _:
            ours = rows = (torch.rand(8, 200, generator=generator) < 0.02).float()
    exact_logits = logits.detach().double().requires_grad_()
    exact = _in_float64(kind, exact_logits, rows)
    (exact_gradient,) = torch.autograd.grad(exact, exact_logits)

    value = loss_function(kind)(logits, ours)
    (gradient,) = torch.autograd.grad(value, logits)
    assert value.item() == pytest.approx(exact.item(), rel=1e-6)
    assert gradient.dtype == dtype and gradient.isfinite().all()
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=rounding, atol=max(smallest, 1e-7))


def test_softmax_weighs_each_row_by_the_sum_of_its_targets() -> None:
    loss, logits = loss_function("softmax"), torch.randn(1, 5)
    first, second = loss(logits, torch.tensor([1])), loss(logits, torch.tensor([3]))
    both, none = torch.tensor([[0.0, 1, 0, 1, 0]]), torch.zeros(1, 5)
    torch.testing.assert_close(loss(logits, both), first + second)
    assert loss(logits, none).item() == 0


@pytest.mark.parametrize(
    ("kind", "label_smoothing"), [("softmax", 1.0), ("softmax", -0.1), ("sigmoid", 0.5), ("bce", 1.0)]
)
def test_smoothing_out_of_range_is_refused(kind: LossKind, label_smoothing: float) -> None:
    with pytest.raises(ValueError, match="label_smoothing must be at least 0 and below"):
        loss_function(kind, label_smoothing=label_smoothing)

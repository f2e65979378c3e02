"""`model.loss`: laws that need no other library (values are compared with optax's in tests/oracles)."""

import math

import pytest
import torch
from torch.nn import functional as F

from model.loss import LossKind, loss_function

KINDS: list[LossKind] = ["softmax", "sigmoid"]


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(kind: LossKind, dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(6, 50)).to(dtype)
    targets = torch.rand(6, 50)
    targets = (targets / targets.sum(dim=1, keepdim=True)).to(dtype)
    loss = loss_function(kind, label_smoothing=0.05)
    assert loss(logits, targets).dtype == torch.float32
    assert torch.equal(loss(logits, targets), loss(logits.float(), targets.float()))


def test_sigmoid_smoothing_is_on_and_off_values_of_each_class() -> None:
    logits, indices = torch.randn(4, 6), torch.tensor([5, 0, 3, 3])
    smoothed = torch.where(F.one_hot(indices, 6).bool(), 0.9999, 0.0001)
    torch.testing.assert_close(
        loss_function("sigmoid", label_smoothing=1e-4)(logits, indices),
        loss_function("sigmoid")(logits, smoothed),
    )


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    for kind in KINDS:
        value = loss_function(kind)(logits, torch.tensor([1]))
        (gradient,) = torch.autograd.grad(value, logits)
        assert value.isfinite() and gradient.isfinite().all()


@pytest.mark.parametrize(("kind", "label_smoothing"), [("softmax", 1.0), ("softmax", -0.1), ("sigmoid", 0.5)])
def test_smoothing_out_of_range_is_refused(kind: LossKind, label_smoothing: float) -> None:
    with pytest.raises(ValueError, match="label_smoothing must be at least 0 and below"):
        loss_function(kind, label_smoothing=label_smoothing)

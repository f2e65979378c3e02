"""Our losses against optax's, values and gradients, on hard, smoothed and mixed targets, at logits up to 100."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import torch

from shardvit.model.loss import loss_function
from shardvit.model.vocabulary import LossKind
from tests.oracles.conftest import Measured

_NAMES = {
    "indices": "one label an image",
    "mixed": "mixed labels",
    "several per image": "several labels an image",
    "none": "no label",
}


def _softmax(logits: jax.Array, targets: jax.Array, smoothing: float) -> jax.Array:
    return optax.softmax_cross_entropy(logits, optax.smooth_labels(targets, smoothing)).mean()


def _sigmoid(logits: jax.Array, targets: jax.Array, smoothing: float) -> jax.Array:
    on_and_off = targets * (1 - smoothing) + (1 - targets) * smoothing
    return optax.sigmoid_binary_cross_entropy(logits, on_and_off).sum(axis=-1).mean()


@pytest.mark.parametrize(("kind", "theirs"), [("softmax", _softmax), ("sigmoid", _sigmoid)])
@pytest.mark.parametrize("label_smoothing", [0.0, 1e-4, 0.1])
@pytest.mark.parametrize("targets", _NAMES)
@pytest.mark.parametrize("largest", ["a few", "a hundred"])
def test_values_and_gradients(
    kind: LossKind, theirs: Callable[..., Any], label_smoothing: float, targets: str, largest: str, measured: Measured
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(8, 11, generator=generator)
    if largest == "a hundred":
        logits += 100 * logits.sign()
    logits.requires_grad_()
    indices = torch.randint(0, 11, (8,), generator=generator)
    one_hot = torch.nn.functional.one_hot(indices, 11).float()
    ours: torch.Tensor
    match targets:
        case "indices":
            ours, rows = indices, one_hot
        case "mixed":
            ours = rows = 0.3 * one_hot + 0.7 * one_hot.roll(1, dims=0)
        case "none":
            ours = rows = torch.zeros(8, 11)
        case _:
            ours = rows = (torch.rand(8, 11, generator=generator) < 0.3).float()

    value = loss_function(kind, label_smoothing=label_smoothing)(logits, ours)
    (gradient,) = torch.autograd.grad(value, logits)

    arrays = jnp.asarray(logits.detach().numpy()), jnp.asarray(rows.numpy())
    their_value, their_gradient = jax.value_and_grad(theirs)(*arrays, label_smoothing)
    if kind == "softmax" and targets == "none" and not label_smoothing:  # no label and no share for the others
        assert value.item() == their_value == 0
        assert not gradient.any() and not their_gradient.any()
        return
    semantic = f"{kind} loss: {_NAMES[targets]}, with and without smoothing, logits to 100"
    measured(semantic, "optax", "values", value, their_value)
    measured(semantic, "optax", "gradients", gradient, their_gradient)

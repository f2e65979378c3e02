"""Linear probe: multinomial logistic regression on features, as scikit-learn's LogisticRegression defines it.

The loss is C times the sum of cross-entropies plus half the squared weights; biases are not regularised. scipy's
L-BFGS-B minimises it; torch computes loss and gradient in float64 on any device. An iteration is two products of [n, D]
and [D, C]. Classes without a training image are never predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.transfer.shots import held_out_rows

_LEAST_DEVIATION = 1e-12
_ITERATIONS, _GRADIENT = 1000, 1e-6


@dataclass(frozen=True)
class Probe:
    """Log-probabilities [n, C] of features [n, D]."""

    mean: Tensor  # float64 [D]
    deviation: Tensor  # float64 [D]
    weights: Tensor  # float64 [D + 1, K] of the classes that were seen; the last row: biases
    classes: Tensor  # int64 [K], ascending
    num_classes: int
    c: float

    def __call__(self, features: Tensor) -> Tensor:
        """Float64 on the weights' device; -inf for classes that were not seen."""
        x = (features.to(self.weights.device, torch.float64) - self.mean) / self.deviation
        seen = (x @ self.weights[:-1] + self.weights[-1]).log_softmax(dim=1)
        every = seen.new_full((len(x), self.num_classes), -torch.inf)
        every[:, self.classes] = seen
        return every


def fit_probe(
    features: Tensor,
    labels: Tensor,
    *,
    samples: NDArray[np.int64],
    num_classes: int,
    c: Sequence[float],
    hold_out: float,
    device: torch.device,
    told: Callable[[str], None] = lambda far: None,
) -> Probe:
    """Fit features [n, D] to labels int64 [n]. Of several `c`, take the one with the best top-1 on rows held out by
    their numbers `samples`, the smallest of equals. `told` hears the progress. ValueError: a single row cannot be
    divided."""
    x, y = features.to(device, torch.float64), labels.to(device)
    best = c[0]
    if len(c) > 1:
        if len(samples) < 2:
            raise ValueError("c cannot be chosen with a single training image: give one")
        out = torch.from_numpy(held_out_rows(samples, share=hold_out)).to(device)
        top1: dict[float, float] = {}
        start: Tensor | None = None
        for each in sorted(c):  # each begins where the last ended, from the strongest regularisation on
            probe = _fit(x[~out], y[~out], num_classes=num_classes, c=each, start=start, told=told)
            start = probe.weights
            top1[each] = float((probe(x[out]).argmax(dim=1) == y[out]).double().mean())
        best = max(sorted(c), key=lambda each: top1[each])
    return _fit(x, y, num_classes=num_classes, c=best, start=None, told=told)


def _fit(
    x: Tensor, y: Tensor, *, num_classes: int, c: float, start: Tensor | None, told: Callable[[str], None]
) -> Probe:
    from scipy.optimize import minimize
    from threadpoolctl import ThreadpoolController

    mean = x.mean(dim=0)
    deviation = x.std(dim=0, correction=0)
    deviation = torch.where(deviation > _LEAST_DEVIATION, deviation, torch.ones_like(deviation))
    x = torch.nn.functional.pad((x - mean) / deviation, (0, 1), value=1.0)
    classes, rows = y.unique(return_inverse=True)
    shape = (x.shape[1], len(classes))
    strength = 1 / (c * len(x))

    def loss(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        weights = torch.from_numpy(flat).to(x.device).view(shape).requires_grad_()
        with torch.enable_grad():
            value = torch.nn.functional.cross_entropy(x @ weights, rows) + strength / 2 * weights[:-1].square().sum()
        (gradient,) = torch.autograd.grad(value, weights)
        return float(value.detach()), gradient.flatten().cpu().numpy()

    far = (f"C {c:g} on {len(x):,} images, {number:,} iterations of {_ITERATIONS:,} at most" for number in count())
    first = np.zeros(shape[0] * shape[1]) if start is None else start.cpu().numpy().ravel()
    # Its threads would compete with torch's for cores: ten times slower.
    with ThreadpoolController().select(prefix="libscipy_openblas").limit(limits=1):
        found = minimize(
            loss,
            first,
            jac=True,
            method="L-BFGS-B",
            callback=lambda _: told(next(far)),
            options={"maxiter": _ITERATIONS, "gtol": _GRADIENT, "ftol": 1e-15},
        )
    return Probe(mean, deviation, torch.from_numpy(found.x).to(x.device).view(shape), classes, num_classes, c)

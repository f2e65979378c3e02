"""Fit classifiers on features: few-shot least squares, a linear probe, k nearest neighbours. In float64, on any device.

Least squares is big_vision's few-shot measure (`fewshot_lsr.py`) in closed form. Features are standardised (deviation +
1e-5) and get a constant feature of 100, whose weight is hardly regularised; targets are 1 for the class and -1 for the
others. One eigendecomposition, of the smaller of X'X [D + 1, D + 1] and XX' [n, n], serves all strengths.

The probe is scikit-learn's LogisticRegression, multinomial: C times the sum of cross-entropies plus half the squared
weights, biases not regularised, minimised by scipy's L-BFGS-B. kNN votes by cosine, weighted by exp(cosine /
temperature) as in DINO, in blocks of bounded memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from shardvit.pipeline.transfer.features import held_out_rows

_LEAST_SQUARES_BIAS = 100.0
_ITERATIONS, _GRADIENT = 1000, 1e-6
_BLOCK_ELEMENTS = 2**25  # elements of the cosine matrix held at a time


@dataclass(frozen=True)
class LinearClassifier:
    """Maps features [n, D] to scores [n, C], in float64 on the weights' device."""

    mean: Tensor  # float64 [D]
    deviation: Tensor  # float64 [D]
    weights: Tensor  # float64 [D + 1, C]; the last row is the constant feature's
    bias: float  # value of the constant feature
    strength: float  # l2, or the probe's C

    def on(self, device: torch.device) -> LinearClassifier:
        moved = (each.to(device) for each in (self.mean, self.deviation, self.weights))
        return LinearClassifier(*moved, bias=self.bias, strength=self.strength)

    def __call__(self, features: Tensor) -> Tensor:
        rows = features.to(self.weights.device, torch.float64)
        return ((rows - self.mean) / self.deviation) @ self.weights[:-1] + self.bias * self.weights[-1]


def fit_least_squares(
    features: Tensor, labels: Tensor, *, num_classes: int, l2: Sequence[float], device: torch.device | None = None
) -> LinearClassifier:
    """Fit finite features [n, D] to labels int64 [n]. Of several strengths `l2`, take the first with the least squared
    leave-one-out error (closed form; standardised over all rows)."""
    x = features.to(device or features.device, torch.float64)
    mean, deviation = x.mean(dim=0), x.std(dim=0, correction=0) + 1e-5
    x = F.pad((x - mean) / deviation, (0, 1), value=_LEAST_SQUARES_BIAS)
    y = 2 * F.one_hot(labels.to(x.device), num_classes).double() - 1
    # (x'x + l2)^-1 x'y, with fewer rows than features x' (xx' + l2)^-1 y; both are left (e + l2)^-1 right
    if has_many_rows := len(x) >= x.shape[1]:
        eigenvalues, vectors = torch.linalg.eigh(x.T @ x)
        left, right = vectors, vectors.T @ (x.T @ y)
    else:
        eigenvalues, vectors = torch.linalg.eigh(x @ x.T)
        left, right = x.T @ vectors, vectors.T @ y
    eigenvalues = eigenvalues.clamp_min(0)  # rounding may make them negative
    best = l2[0]
    if len(l2) > 1:
        rows = x @ vectors if has_many_rows else vectors

        def left_out_error(strength: float) -> float:
            """Mean square of (y - Hy) / (1 - diag H), with H = x (x'x + l2)^-1 x'."""
            if has_many_rows:
                scaled = rows / (eigenvalues + strength)
                residual, rest = y - scaled @ right, 1 - (scaled * rows).sum(dim=1)
            else:
                share = strength / (eigenvalues + strength)
                residual, rest = (rows * share) @ right, (rows.square() * share).sum(dim=1)
            return float((residual / rest[:, None]).square().mean())

        best = min(l2, key=left_out_error)
    weights = (left / (eigenvalues + best)) @ right
    return LinearClassifier(mean, deviation, weights, bias=_LEAST_SQUARES_BIAS, strength=best)


@dataclass(frozen=True)
class Probe:
    """Maps features [n, D] to log-probabilities [n, C]; -inf for classes without a training image."""

    seen: LinearClassifier  # scores of `classes`
    classes: Tensor  # int64 [K], classes with a training image, ascending
    num_classes: int

    def __call__(self, features: Tensor) -> Tensor:
        logs = self.seen(features).log_softmax(dim=1)
        every = logs.new_full((len(logs), self.num_classes), -torch.inf)
        every[:, self.classes] = logs
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
    progress: Callable[[str], None] = lambda far: None,
) -> Probe:
    """Fit features [n, D] to labels int64 [n]. Of several `c`, take the one with the best top-1 on rows held out by
    their numbers `samples`, the smallest on ties. ValueError if a single row would have to be split."""
    x, y = features.to(device, torch.float64), labels.to(device)
    best = c[0]
    if len(c) > 1:
        if len(samples) < 2:
            raise ValueError("c cannot be chosen with a single training image: give one")
        out = torch.from_numpy(held_out_rows(samples, share=hold_out)).to(device)
        top1: dict[float, float] = {}
        start: Tensor | None = None
        for each in sorted(c):  # warm start, from the strongest regularisation
            probe = _fit_probe(x[~out], y[~out], num_classes, c=each, start=start, progress=progress)
            start = probe.seen.weights
            top1[each] = float((probe(x[out]).argmax(dim=1) == y[out]).double().mean())
        best = max(sorted(c), key=lambda each: top1[each])
    return _fit_probe(x, y, num_classes, c=best, start=None, progress=progress)


def _fit_probe(
    x: Tensor, y: Tensor, num_classes: int, *, c: float, start: Tensor | None, progress: Callable[[str], None]
) -> Probe:
    from scipy.optimize import minimize
    from threadpoolctl import ThreadpoolController

    mean, deviation = x.mean(dim=0), x.std(dim=0, correction=0)
    deviation = torch.where(deviation > 1e-12, deviation, torch.ones_like(deviation))
    x = F.pad((x - mean) / deviation, (0, 1), value=1.0)
    classes, rows = y.unique(return_inverse=True)
    shape, strength = (x.shape[1], len(classes)), 1 / (c * len(x))

    def loss(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        weights = torch.from_numpy(flat).to(x.device).view(shape).requires_grad_()
        with torch.enable_grad():
            value = F.cross_entropy(x @ weights, rows) + strength / 2 * weights[:-1].square().sum()
        (gradient,) = torch.autograd.grad(value, weights)
        return float(value.detach()), gradient.flatten().cpu().numpy()

    far = (f"C {c:g} on {len(x):,} images, {number:,} iterations of {_ITERATIONS:,} at most" for number in count())
    # OpenBLAS threads would compete with torch's for cores: ten times slower.
    with ThreadpoolController().select(prefix="libscipy_openblas").limit(limits=1):
        found = minimize(
            loss,
            np.zeros(shape[0] * shape[1]) if start is None else start.cpu().numpy().ravel(),
            jac=True,
            method="L-BFGS-B",
            callback=lambda _: progress(next(far)),
            options={"maxiter": _ITERATIONS, "gtol": _GRADIENT, "ftol": 1e-15},
        )
    weights = torch.from_numpy(found.x).to(x.device).view(shape)
    return Probe(LinearClassifier(mean, deviation, weights, bias=1.0, strength=c), classes, num_classes)


def knn_votes(
    features: Tensor,
    *,
    train: Tensor,
    labels: Tensor,
    num_classes: int,
    k: Sequence[int],
    temperature: float,
    device: torch.device,
    progress: Callable[[str], None] = lambda far: None,
) -> list[Tensor]:
    """Votes for features [n, D] by the `k` nearest (all if fewer) of `train` [m, D] with `labels` int64 [m]: for each
    `k` float64 [n, C] on the CPU. Cosines are float32."""
    known, classes = _unit(train, device), labels.to(device)
    most = min(max(k), len(train))
    votes = [torch.zeros(len(features), num_classes, dtype=torch.float64) for _ in k]
    block = max(1, _BLOCK_ELEMENTS // max(1, len(train)))
    for start in range(0, len(features), block):
        progress(f"{start:,} of {len(features):,} images")
        rows = slice(start, start + block)
        cosines, nearest = (_unit(features[rows], device) @ known.T).topk(most, dim=1)
        # relative to the nearest: same shares, no overflow at low temperatures
        weights = ((cosines - cosines[:, :1]).double() / temperature).exp()
        for number, neighbours in enumerate(k):
            table = torch.zeros(len(cosines), num_classes, dtype=torch.float64, device=device)
            table.scatter_add_(1, classes[nearest[:, :neighbours]], weights[:, :neighbours])
            votes[number][rows] = table.cpu()
    return votes


def _unit(features: Tensor, device: torch.device) -> Tensor:
    return F.normalize(features.to(device, torch.float32), dim=1)

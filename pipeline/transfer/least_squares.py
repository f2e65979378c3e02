"""Regularised linear least squares onto the classes, in closed form: big_vision's few-shot measure.

Features are standardised (deviation + 1e-5) and get a constant feature of 100, so that its weight is hardly
regularised. Targets are 1 for the class and -1 for the others; the greatest score wins. Same formula as
`fewshot_lsr.py` of google-research/big_vision, in float64. One eigendecomposition serves all strengths: of the smaller
of X'X [D + 1, D + 1] and XX' [n, n].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BIAS = 100.0
_LEAST_DEVIATION = 1e-5


@dataclass(frozen=True)
class LinearClassifier:
    """Scores [n, C] of features [n, D]."""

    mean: Tensor  # float64 [D]
    deviation: Tensor  # float64 [D]
    weights: Tensor  # float64 [D + 1, C]; the last row is the constant feature's
    l2: float

    def on(self, device: torch.device) -> LinearClassifier:
        """A copy on `device`."""
        moved = (each.to(device) for each in (self.mean, self.deviation, self.weights))
        return LinearClassifier(*moved, l2=self.l2)

    def __call__(self, features: Tensor) -> Tensor:
        """Scores in float64 on the weights' device."""
        rows = features.to(self.weights.device, torch.float64)
        return ((rows - self.mean) / self.deviation) @ self.weights[:-1] + BIAS * self.weights[-1]


def fit_least_squares(
    features: Tensor, labels: Tensor, *, num_classes: int, l2: Sequence[float], device: torch.device | None = None
) -> LinearClassifier:
    """Fit features [n, D] (finite) to labels int64 [n]. Of several strengths `l2`, the one whose squared leave-one-out
    error is least (in closed form; the standardisation is that of all rows), the first of equal ones."""
    x = features.to(device or features.device, torch.float64)
    mean, deviation = x.mean(dim=0), x.std(dim=0, correction=0) + _LEAST_DEVIATION
    x = torch.nn.functional.pad((x - mean) / deviation, (0, 1), value=BIAS)
    y = 2 * torch.nn.functional.one_hot(labels.to(x.device), num_classes).double() - 1
    # (x'x + l2)^-1 x'y, or where there are fewer rows than features x' (xx' + l2)^-1 y; left (e + l2)^-1 right
    if has_many_rows := len(x) >= x.shape[1]:
        eigenvalues, vectors = torch.linalg.eigh(x.T @ x)
        left, right = vectors, vectors.T @ (x.T @ y)
    else:
        eigenvalues, vectors = torch.linalg.eigh(x @ x.T)
        left, right = x.T @ vectors, vectors.T @ y
    eigenvalues = eigenvalues.clamp_min(0)  # rounded below it
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
    return LinearClassifier(mean, deviation, weights, l2=best)

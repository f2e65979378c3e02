"""Few-shot least squares equal big_vision's formula, written down once more in float64, and scikit-learn's Ridge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.linear_model import Ridge, RidgeCV

from pipeline.transfer.least_squares import fit_least_squares

CLASSES = 4


def rows(n: int, *, width: int, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    draw = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(CLASSES), draw.integers(0, CLASSES, n - CLASSES)])
    centres = np.random.default_rng(99).normal(size=(CLASSES, width)) * 0.5
    values = centres[labels] * np.linspace(0.1, 9, width) + draw.normal(size=(n, width)) * np.linspace(9, 0.1, width)
    return (values + 3).astype(np.float32), labels.astype(np.int64)


def prepared(x: NDArray[np.float32], like: NDArray[np.float32]) -> NDArray[np.float64]:
    """Standardised by `like` as the evaluator does it, with the constant feature."""
    exact = like.astype(np.float64)
    scaled = (x.astype(np.float64) - exact.mean(axis=0)) / (exact.std(axis=0) + 1e-5)
    return np.concatenate([scaled, np.full((len(x), 1), 100.0)], axis=1)


def signs(labels: NDArray[np.int64]) -> NDArray[np.float64]:
    return 2.0 * np.eye(CLASSES)[labels] - 1.0


@pytest.mark.parametrize("l2", [2.0**-10, 1.0, 1024.0])
@pytest.mark.parametrize(("n", "width"), [(12, 40), (41, 40), (300, 40)])
def test_scores_are_those_of_the_normal_equations_and_of_ridge(n: int, width: int, l2: float) -> None:
    (x, labels), (held_out, _) = rows(n, width=width), rows(50, width=width, seed=1)
    scores = fit_least_squares(torch.from_numpy(x), torch.from_numpy(labels), num_classes=CLASSES, l2=[l2])(
        torch.from_numpy(held_out)
    ).numpy()
    a, b = prepared(x, x), prepared(held_out, x)
    weights = np.linalg.solve(a.T @ a + l2 * np.eye(a.shape[1]), a.T @ signs(labels))
    np.testing.assert_allclose(scores, b @ weights, rtol=1e-6, atol=1e-7)
    ridge = Ridge(alpha=l2, fit_intercept=False, solver="svd").fit(a, signs(labels))
    np.testing.assert_allclose(scores, ridge.predict(b), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("n", [35, 50])
def test_the_strength_is_the_one_of_scikit_learns_leave_one_out(n: int) -> None:
    x, labels = rows(n, width=40)
    strengths = [2.0**power for power in range(-6, 16, 3)]
    fitted = fit_least_squares(torch.from_numpy(x), torch.from_numpy(labels), num_classes=CLASSES, l2=strengths)
    oracle = RidgeCV(alphas=strengths, fit_intercept=False).fit(prepared(x, x), signs(labels))
    assert fitted.l2 == oracle.alpha_
    assert strengths[0] < fitted.l2, "the choice of this test says nothing"


def test_a_constant_feature_and_equal_images_are_no_trouble() -> None:
    x, labels = rows(12, width=8)
    x[:, 3] = 7.0
    x[:] = x[:1]
    scores = fit_least_squares(torch.from_numpy(x), torch.from_numpy(labels), num_classes=CLASSES, l2=[1.0, 2.0])
    assert scores(torch.from_numpy(x)).isfinite().all()

"""The probe's probabilities are scikit-learn's LogisticRegression's, and C is chosen on images held out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from threadpoolctl import ThreadpoolController, threadpool_info

from pipeline.transfer.probe import fit_probe
from pipeline.transfer.shots import held_out_rows

CPU = torch.device("cpu")
SAMPLES = np.arange(1000, 1150)
draw = np.random.default_rng(1)
LABELS = torch.from_numpy(draw.integers(0, 4, 150)) * 2  # classes 0, 2, 4, 6 of 8
X = torch.from_numpy((draw.normal(size=(150, 12)) * np.linspace(0.1, 20, 12)).astype(np.float32))
X[:, 5:] += LABELS[:, None] * 2
HELD_OUT = X + torch.from_numpy(draw.normal(size=(150, 12)).astype(np.float32))


def fit(c: tuple[float, ...]) -> torch.Tensor:
    probe = fit_probe(X, LABELS, samples=SAMPLES, num_classes=8, c=c, hold_out=0.2, device=CPU)
    return probe(HELD_OUT)


@pytest.mark.parametrize("c", [1e-3, 0.1, 10.0])
def test_probabilities_are_scikit_learns(c: float) -> None:
    logs = fit((c,))
    scaler = StandardScaler().fit(X.double().numpy())
    oracle = LogisticRegression(C=c, tol=1e-9, max_iter=10_000).fit(
        scaler.transform(X.double().numpy()), LABELS.numpy()
    )
    expected = oracle.predict_proba(scaler.transform(HELD_OUT.double().numpy()))
    np.testing.assert_allclose(logs.exp()[:, ::2].numpy(), expected, atol=2e-4)
    assert logs[:, 1::2].isneginf().all(), "a class that was never seen is never predicted"


def test_c_is_the_best_on_what_is_held_out() -> None:
    out = torch.from_numpy(held_out_rows(SAMPLES, share=0.2))
    assert int(out.sum()) == 30
    scaler = StandardScaler().fit(X[~out].double().numpy())
    grid = (1e-6, 1e-3, 1.0)
    accuracies = [
        LogisticRegression(C=c, tol=1e-8, max_iter=10_000)
        .fit(scaler.transform(X[~out].double().numpy()), LABELS[~out].numpy())
        .score(scaler.transform(X[out].double().numpy()), LABELS[out].numpy())
        for c in grid
    ]
    probe = fit_probe(X, LABELS, samples=SAMPLES, num_classes=8, c=grid[::-1], hold_out=0.2, device=CPU)
    assert probe.c == grid[int(np.argmax(accuracies))] and len(set(accuracies)) > 1


def test_a_single_image_chooses_nothing() -> None:
    with pytest.raises(ValueError, match="single"):
        fit_probe(X[:1], LABELS[:1], samples=SAMPLES[:1], num_classes=8, c=(1.0, 2.0), hold_out=0.2, device=CPU)


def test_the_solver_keeps_to_one_thread_beside_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    minimize = scipy.optimize.minimize

    def looking(*args: Any, **more: Any) -> Any:
        seen.extend(library["num_threads"] for library in threadpool_info() if library["internal_api"] == "openblas")
        return minimize(*args, **more)

    monkeypatch.setattr(scipy.optimize, "minimize", looking)
    libraries = ThreadpoolController().select(internal_api="openblas")
    if not libraries.lib_controllers:
        pytest.skip("scipy has another library here")
    with libraries.limit(limits=2):
        fit((0.1,))
    assert seen and set(seen) == {1}

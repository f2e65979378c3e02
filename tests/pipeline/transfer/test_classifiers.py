"""Few-shot least squares, the probe and kNN equal scikit-learn (and big_vision's formula, written down once more)."""

from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression, Ridge, RidgeCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from threadpoolctl import ThreadpoolController, threadpool_info

from shardvit.pipeline.transfer import classifiers
from shardvit.pipeline.transfer.classifiers import fit_least_squares, fit_probe, knn_votes
from shardvit.pipeline.transfer.features import held_out_rows

CPU = torch.device("cpu")
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
    assert fitted.strength == oracle.alpha_
    assert strengths[0] < fitted.strength, "the choice of this test says nothing"


def test_a_constant_feature_and_equal_images_are_no_trouble() -> None:
    x, labels = rows(12, width=8)
    x[:, 3] = 7.0
    x[:] = x[:1]
    scores = fit_least_squares(torch.from_numpy(x), torch.from_numpy(labels), num_classes=CLASSES, l2=[1.0, 2.0])
    assert scores(torch.from_numpy(x)).isfinite().all()


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
    assert probe.seen.strength == grid[int(np.argmax(accuracies))] and len(set(accuracies)) > 1


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


knn_draw = np.random.default_rng(0)
KNN_LABELS = torch.from_numpy(knn_draw.integers(0, 5, 200))
TRAIN = torch.from_numpy(knn_draw.normal(size=(200, 16)).astype(np.float32)) + KNN_LABELS[:, None].float() / 3
KNN_HELD_OUT = torch.from_numpy(knn_draw.normal(size=(70, 16)).astype(np.float32)) + 0.5


@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_votes_are_scikit_learns(temperature: float) -> None:
    every = knn_votes(
        KNN_HELD_OUT, train=TRAIN, labels=KNN_LABELS, num_classes=5, k=(1, 20), temperature=temperature, device=CPU
    )
    for k, votes in zip((1, 20), every, strict=True):
        oracle = KNeighborsClassifier(
            k, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / temperature)
        ).fit(TRAIN.double().numpy(), KNN_LABELS.numpy())
        shares = votes / votes.sum(dim=1, keepdim=True)
        np.testing.assert_allclose(shares.numpy(), oracle.predict_proba(KNN_HELD_OUT.double().numpy()), atol=1e-4)
        assert (votes.argmax(dim=1).numpy() == oracle.predict(KNN_HELD_OUT.double().numpy())).all()


def test_votes_do_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    votes = [
        knn_votes(KNN_HELD_OUT, train=TRAIN, labels=KNN_LABELS, num_classes=5, k=(9,), temperature=0.1, device=CPU)[0]
        for elements in (2**25, 1, 1700)
        if not monkeypatch.setattr(classifiers, "_BLOCK_ELEMENTS", elements)
    ]
    for other in votes[1:]:
        torch.testing.assert_close(votes[0], other, rtol=1e-4, atol=0)


def test_a_low_temperature_and_more_neighbours_than_images() -> None:
    votes = knn_votes(
        KNN_HELD_OUT, train=TRAIN, labels=KNN_LABELS, num_classes=5, k=(9999,), temperature=1e-4, device=CPU
    )[0]
    nearest = (torch.nn.functional.normalize(KNN_HELD_OUT) @ torch.nn.functional.normalize(TRAIN).T).argmax(dim=1)
    assert votes.isfinite().all() and (votes.argmax(dim=1) == KNN_LABELS[nearest]).all()

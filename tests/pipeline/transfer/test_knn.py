"""Votes equal scikit-learn's KNeighborsClassifier, and do not depend on the blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from pipeline.transfer import knn
from pipeline.transfer.knn import knn_votes

CPU = torch.device("cpu")
draw = np.random.default_rng(0)
LABELS = torch.from_numpy(draw.integers(0, 5, 200))
TRAIN = torch.from_numpy(draw.normal(size=(200, 16)).astype(np.float32)) + LABELS[:, None].float() / 3
HELD_OUT = torch.from_numpy(draw.normal(size=(70, 16)).astype(np.float32)) + 0.5


@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_votes_are_scikit_learns(temperature: float) -> None:
    every = knn_votes(
        HELD_OUT, train=TRAIN, labels=LABELS, num_classes=5, k=(1, 20), temperature=temperature, device=CPU
    )
    for k, votes in zip((1, 20), every, strict=True):
        oracle = KNeighborsClassifier(
            k, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / temperature)
        ).fit(TRAIN.double().numpy(), LABELS.numpy())
        shares = votes / votes.sum(dim=1, keepdim=True)
        np.testing.assert_allclose(shares.numpy(), oracle.predict_proba(HELD_OUT.double().numpy()), atol=1e-4)
        assert (votes.argmax(dim=1).numpy() == oracle.predict(HELD_OUT.double().numpy())).all()


def test_votes_do_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    votes = [
        knn_votes(HELD_OUT, train=TRAIN, labels=LABELS, num_classes=5, k=(9,), temperature=0.1, device=CPU)[0]
        for elements in (2**25, 1, 1700)
        if not monkeypatch.setattr(knn, "_BLOCK_ELEMENTS", elements)
    ]
    for other in votes[1:]:
        torch.testing.assert_close(votes[0], other, rtol=1e-4, atol=0)


def test_a_low_temperature_and_more_neighbours_than_images() -> None:
    votes = knn_votes(HELD_OUT, train=TRAIN, labels=LABELS, num_classes=5, k=(9999,), temperature=1e-4, device=CPU)[0]
    nearest = (torch.nn.functional.normalize(HELD_OUT) @ torch.nn.functional.normalize(TRAIN).T).argmax(dim=1)
    assert votes.isfinite().all() and (votes.argmax(dim=1) == LABELS[nearest]).all()

"""Shots: so many of each class, those of 5 among those of 10, the same whatever else is in the set."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.transfer.features import choose_images, choose_shots, held_out_rows

LABELS = np.random.default_rng(0).integers(0, 6, 400)


def test_each_class_has_its_shots_and_fewer_are_among_more() -> None:
    ten = choose_shots(LABELS, shots=10, seed=0)
    assert np.bincount(LABELS[ten]).tolist() == [10] * 6 and len(set(ten.tolist())) == 60
    assert (np.sort(LABELS[ten]) == LABELS[ten]).all()
    five = choose_shots(LABELS, shots=5, seed=0)
    assert five.reshape(6, 5).tolist() == ten.reshape(6, 10)[:, :5].tolist()
    assert set(ten.tolist()) != set(choose_shots(LABELS, shots=10, seed=1).tolist())


def test_a_class_with_too_few_gives_all_that_it_has() -> None:
    taken = choose_shots(LABELS, shots=1000, seed=3)
    assert sorted(taken.tolist()) == list(range(400))


def test_a_damaged_image_is_replaced_by_the_next_of_its_class_and_nothing_else_changes() -> None:
    ten = choose_shots(LABELS, shots=10, seed=0).reshape(6, 10)
    labels = LABELS.copy()
    labels[ten[2, 3]] = -1
    nine = choose_shots(labels, shots=9, seed=0).reshape(6, 9)
    for label in range(6):
        expected = np.delete(ten[label], 3) if label == 2 else ten[label, :9]
        assert nine[label].tolist() == expected.tolist()


def test_other_classes_do_not_change_the_shots_of_one() -> None:
    ten = choose_shots(LABELS, shots=10, seed=0).reshape(6, 10)
    others = np.where(LABELS == 4, 0, -1)
    assert choose_shots(others, shots=10, seed=0).tolist() == ten[4].tolist()


@pytest.mark.parametrize(("n", "most"), [(400, 100), (5, 5), (5, 9)])
def test_images_are_drawn_once_each(n: int, most: int) -> None:
    chosen = choose_images(n, most=most)
    assert len(set(chosen.tolist())) == min(n, most) and (np.sort(chosen) == chosen).all()
    assert set(choose_images(n, most=max(1, most - 1)).tolist()) <= set(chosen.tolist())


@pytest.mark.parametrize(("n", "share", "count"), [(100, 0.2, 20), (2, 0.01, 1), (2, 0.99, 1), (10, 0.25, 2)])
def test_held_out_rows_are_a_share_of_the_samples(n: int, share: float, count: int) -> None:
    samples = np.arange(n) * 7
    chosen = held_out_rows(samples, share=share)
    assert int(chosen.sum()) == count
    turned = held_out_rows(samples[::-1].copy(), share=share)
    assert (turned[::-1] == chosen).all()

"""Which patches are corrupted: exactly half, in the paper's shares, and a function of (seed, epoch, sample) alone."""

import numpy as np
import pytest
import torch

from shardvit.data_shards.loading.batch import Batch
from shardvit.pipeline.tasks.patch_corruption import (
    Corruption,
    corruption_held_out,
    corruption_in_training,
    draw_corruption,
)

PATCHES = 16
IMAGES = 20_000


def batch(samples: list[int], *, epochs: list[int]) -> Batch:
    count = len(samples)
    return Batch(
        images=torch.zeros(count, 8, 8, 3, dtype=torch.uint8),
        mirrored=torch.zeros(count, dtype=torch.bool),
        labels=torch.zeros(count, dtype=torch.int64),
        counted=torch.ones(count, dtype=torch.bool),
        substituted=torch.zeros(count, dtype=torch.bool),
        samples=torch.tensor(samples),
        epochs=torch.tensor(epochs),
        keys=("",) * count,
    )


def same(first: Corruption, second: Corruption) -> bool:
    return torch.equal(first.source, second.source) and torch.equal(first.corrupted, second.corrupted)


@pytest.fixture(scope="module")
def many() -> Corruption:
    return draw_corruption(5, np.arange(IMAGES), num_patches=PATCHES)


@pytest.mark.parametrize("num_patches", [2, 4, 9, 49, 196])
def test_half_are_corrupted_rounded_down_and_the_others_are_left(num_patches: int):
    drawn = draw_corruption(1, np.arange(300), num_patches=num_patches)
    assert drawn.corrupted.shape == (300, num_patches // 2) and drawn.source.shape == (300, num_patches)
    assert drawn.corrupted.dtype == drawn.source.dtype == torch.int64
    assert ((drawn.source >= 0) & (drawn.source <= num_patches)).all()
    for source, corrupted in zip(drawn.source.tolist(), drawn.corrupted.tolist(), strict=True):
        assert len(set(corrupted)) == num_patches // 2
        assert all(source[at] == at for at in range(num_patches) if at not in corrupted)


def test_the_shares_are_the_papers(many: Corruption):
    given = many.source.gather(1, many.corrupted)
    masked, kept = given == PATCHES, given == many.corrupted
    count = given.numel()
    for found, share in ((masked, 0.8), (kept, 0.1), (~masked & ~kept, 0.1)):
        assert abs(found.sum().item() - share * count) < 5 * (share * (1 - share) * count) ** 0.5


def test_every_patch_is_corrupted_equally_often_and_replaced_by_each_other_one(many: Corruption):
    counts = torch.bincount(many.corrupted.flatten(), minlength=PATCHES)
    assert (counts - IMAGES / 2).abs().max() < 5 * (IMAGES / 4) ** 0.5
    given = many.source.gather(1, many.corrupted)
    replaced = (given != PATCHES) & (given != many.corrupted)
    pairs = torch.bincount(many.corrupted[replaced] * PATCHES + given[replaced], minlength=PATCHES**2)
    pairs = pairs.view(PATCHES, PATCHES)
    assert not pairs.diagonal().any()
    others = pairs[~torch.eye(PATCHES, dtype=torch.bool)].double()
    chi_square = ((others - others.mean()) ** 2 / others.mean()).sum().item()
    degrees = len(others) - 1
    assert abs(chi_square - degrees) < 5 * (2 * degrees) ** 0.5


def test_an_image_has_the_same_whatever_it_is_drawn_with(many: Corruption):
    some = [3, 11_111, 7, 19_999]
    alone = draw_corruption(5, np.array(some), num_patches=PATCHES)
    assert same(alone, Corruption(many.source[some], many.corrupted[some]))


def test_training_has_another_one_each_epoch_and_evaluation_always_the_same():
    def train(seed: int, epoch: int) -> Corruption:
        return corruption_in_training(batch([4, 5], epochs=[epoch, epoch]), seed=seed, num_patches=PATCHES)

    def held_out(seed: int, epoch: int) -> Corruption:
        return corruption_held_out(batch([4, 5], epochs=[epoch, epoch]), seed=seed, num_patches=PATCHES)

    assert same(train(1, 0), train(1, 0)) and same(held_out(1, 0), held_out(1, 3))
    different = [train(1, 0), train(1, 1), train(2, 0), held_out(1, 0), held_out(2, 0)]
    assert not any(same(first, second) for i, first in enumerate(different) for second in different[:i])
    assert not torch.equal(train(1, 0).source[0], train(1, 0).source[1])

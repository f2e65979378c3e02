"""Which patches are corrupted, and how: a function of (seed, epoch, sample) in training, (seed, sample) in evaluation.

So it does not depend on world size, workers, micro-batch or a resume, and held-out numbers are comparable. The shares
are those of the ViT paper (appendix B.1.2) and BERT. Cost: about 1.5 random words a patch, 20 ns each, on the CPU,
while a GPU is still busy with the previous batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike

from data_shards.loading.batch import Batch
from data_shards.order.randomness import uniforms
from data_shards.vocabulary import RandomStream

_MASK_SHARE, _OTHER_SHARE = 0.8, 0.1  # of the corrupted patches; the rest is kept as it is


@dataclass(frozen=True)
class Corruption:
    """What is done to the N patches of n images."""

    source: torch.Tensor  # int64 [n, N]: the number of the patch whose embedding each is given; N for the mask's
    corrupted: torch.Tensor  # int64 [n, N // 2]: the patches to predict


def corruption_in_training(batch: Batch, *, seed: int, num_patches: int) -> Corruption:
    """Differs between epochs."""
    return draw_corruption(
        RandomStream.CORRUPTION_TRAIN, seed, batch.epochs.numpy(), batch.samples.numpy(), num_patches=num_patches
    )


def corruption_held_out(batch: Batch, *, seed: int, num_patches: int) -> Corruption:
    """The same in every evaluation."""
    return draw_corruption(RandomStream.CORRUPTION_HELD_OUT, seed, batch.samples.numpy(), num_patches=num_patches)


def draw_corruption(*key: ArrayLike, num_patches: int) -> Corruption:
    """Corrupt a random half of each image's patches (rounded down): 80 % of them get the mask's embedding, 10 % that of
    another patch of the same image (so that an image's loss does not depend on its batch), and 10 % keep theirs.
    `key`: words of `randomness.uniforms`; arrays have an entry for each image."""
    count = num_patches // 2
    draws = uniforms(*key, draws=num_patches + count)
    corrupted = np.argsort(draws[:, :num_patches], axis=1, kind="stable")[:, :count]
    kind = draws[:, num_patches:]
    # The draw's position between the two shares selects the other patch.
    steps = np.floor((kind - _MASK_SHARE) / _OTHER_SHARE * (num_patches - 1)).astype(np.int64).clip(0, num_patches - 2)
    other = (corrupted + 1 + steps) % num_patches
    given = np.where(kind < _MASK_SHARE, num_patches, np.where(kind < _MASK_SHARE + _OTHER_SHARE, other, corrupted))
    source = np.tile(np.arange(num_patches), (len(draws), 1))
    np.put_along_axis(source, corrupted, given, axis=1)
    return Corruption(source=torch.from_numpy(source), corrupted=torch.from_numpy(corrupted))

"""Choose training images by hash: the shots of each class, a part of the set, the held-out ones. Pure functions.

By hash of (seed, sample's number), in any process and at any time the same: the shots of 5 are among those of 10, and
where an image is damaged the next of its class takes its place, while nothing else changes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from data_shards.order.randomness import hash_words
from data_shards.vocabulary import RandomStream

Int64s = NDArray[np.int64]


def choose_shots(labels: Int64s, *, shots: int, seed: int) -> Int64s:
    """The numbers of `shots` samples of each class, or of all that it has; by class, then in the order drawn.
    `labels`: int64 [n], the class of each sample; those below 0 are not taken."""
    keys = hash_words(RandomStream.FEW_SHOT, seed, np.arange(len(labels)))
    order = np.lexsort((keys, labels))
    order = order[labels[order] >= 0]
    sorted_labels = labels[order]
    first_of_class = np.searchsorted(sorted_labels, sorted_labels, side="left")
    return order[np.arange(len(order)) - first_of_class < shots].astype(np.int64)


def choose_images(num_samples: int, *, most: int) -> Int64s:
    """The numbers of `most` samples of a set, or of all if it has fewer, ascending; always the same ones."""
    keys = hash_words(RandomStream.TRANSFER_IMAGES, 0, np.arange(num_samples))
    return np.sort(np.argsort(keys, kind="stable")[:most]).astype(np.int64)


def held_out_rows(samples: Int64s, *, share: float) -> NDArray[np.bool_]:
    """Mask of the samples that choose the regularisation: bool [n], round(share * n), at least one and not all."""
    count = min(max(1, round(share * len(samples))), len(samples) - 1)
    keys = hash_words(RandomStream.TRANSFER_HOLD_OUT, 0, samples)
    chosen = np.zeros(len(samples), dtype=np.bool_)
    chosen[np.argsort(keys, kind="stable")[:count]] = True
    return chosen

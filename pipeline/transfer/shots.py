"""Choose training images: the shots of each class, a part of the set, the held-out ones. Pure functions.

Choices are by hash of (seed, sample number), so the 5 shots are among the 10 shots, and if an image is damaged the next
one of its class replaces it and nothing else changes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from data_shards.order.randomness import hash_words
from data_shards.vocabulary import RandomStream

Int64s = NDArray[np.int64]


def choose_shots(labels: Int64s, *, shots: int, seed: int) -> Int64s:
    """Numbers of up to `shots` samples per class, by class, then in the order drawn. `labels`: classes of the samples,
    int64 [n]; those below 0 are not taken."""
    keys = hash_words(RandomStream.FEW_SHOT, seed, np.arange(len(labels)))
    order = np.lexsort((keys, labels))
    order = order[labels[order] >= 0]
    sorted_labels = labels[order]
    first_of_class = np.searchsorted(sorted_labels, sorted_labels, side="left")
    return order[np.arange(len(order)) - first_of_class < shots].astype(np.int64)


def choose_images(num_samples: int, *, most: int) -> Int64s:
    """Numbers of up to `most` samples of a set, ascending; always the same ones."""
    keys = hash_words(RandomStream.TRANSFER_IMAGES, 0, np.arange(num_samples))
    return np.sort(np.argsort(keys, kind="stable")[:most]).astype(np.int64)


def held_out_rows(samples: Int64s, *, share: float) -> NDArray[np.bool_]:
    """Mask of the samples that choose the regularisation: bool [n], round(share * n), at least one and not all."""
    count = min(max(1, round(share * len(samples))), len(samples) - 1)
    keys = hash_words(RandomStream.TRANSFER_HOLD_OUT, 0, samples)
    chosen = np.zeros(len(samples), dtype=np.bool_)
    chosen[np.argsort(keys, kind="stable")[:count]] = True
    return chosen

"""A micro-batch of pixels and labels; flip, normalisation, erasing and mixing follow on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardvit.data_shards.errors import Fault
from shardvit.data_shards.loading.erasing import Erasure
from shardvit.data_shards.loading.mixing import Mix


@dataclass(frozen=True)
class Batch:
    """One micro-batch of n samples; with `mix`, n + 1 rows.

    The last row is then the next slot's sample, used only to mix into the row before it. Images, `mirrored` and labels
    may be on a GPU (`device_prefetch`); the other fields stay on the host, where they are used.
    """

    images: torch.Tensor  # uint8 [n, size, size, 3]; of `images.channels` float32 [n, size, size, channels]
    mirrored: torch.Tensor  # bool [n]: flip left to right on the device
    labels: torch.Tensor  # int64 [n], or [n, k] padded with -1 where samples have several labels or none
    counted: torch.Tensor  # bool [n]: False for padding and damage in evaluation
    substituted: torch.Tensor  # bool [n]: this sample replaces a damaged one
    samples: torch.Tensor  # int64 [n]: numbers in the set
    epochs: torch.Tensor  # int64 [n]; with repeated augmentation each repeat counts, so that its random numbers differ
    keys: tuple[str, ...]  # WebDataset keys
    faults: tuple[Fault, ...] = ()
    mix: Mix | None = None
    erasures: tuple[Erasure, ...] = ()


def batch_of(images: torch.Tensor, *, keys: Sequence[str]) -> Batch:
    """Wrap pixels as in `Batch.images` as a batch without labels (-1)."""
    count = len(images)
    return Batch(
        images=images,
        mirrored=torch.zeros(count, dtype=torch.bool),
        labels=torch.full((count,), -1),
        counted=torch.ones(count, dtype=torch.bool),
        substituted=torch.zeros(count, dtype=torch.bool),
        samples=torch.arange(count),
        epochs=torch.zeros(count, dtype=torch.int64),
        keys=tuple(keys),
    )

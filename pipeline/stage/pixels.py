"""Batch -> model inputs and targets on the device: flip, normalise, erase, mix.

A GPU reads and writes 24 bytes per value (44 with mixup): 0.3 ms for 256 images of 224 px at 3 TB/s [computed, not
measured]. On a CPU the permutation to NCHW is the expensive pass, so it comes first, on one-byte values. Nothing here
makes the host wait for a GPU.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.loading.erasing import NOISE_PLACES, Erasure, normal_numbers
from shardvit.data_shards.loading.mixing import Mix
from shardvit.data_shards.vocabulary import GOOGLES, LabelKind, Normalisation


def model_input(
    batch: Batch, *, device: torch.device, dtype: torch.dtype, normalisation: Normalisation = GOOGLES
) -> torch.Tensor:
    """Flip, normalise, erase and mix on the device -> [n, channels, size, size] of `dtype`; in float32, rounded
    once."""
    values = normalised(flipped(batch, device=device), normalisation)
    if batch.erasures:
        erase(values, batch.erasures)
    if batch.mix is not None:
        values = _mixed_images(values, batch.mix)
    return values.to(dtype)


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to the device without waiting. For small tensors: torch keeps the page-locked memory of all pending ones."""
    source = values if device.type == "cpu" else values.pin_memory()
    return source.to(device, non_blocking=True)


def flipped(batch: Batch, *, device: torch.device) -> torch.Tensor:
    """[n, channels, size, size], contiguous, as read: uint8, or with `images.channels` float32."""
    pixels = batch.images.to(device, non_blocking=True).permute(0, 3, 1, 2)
    mirrored = batch.mirrored.to(device, non_blocking=True)
    out = torch.empty(pixels.shape, dtype=pixels.dtype, device=device)
    return torch.where(mirrored[:, None, None, None], pixels.flip(3), pixels, out=out)


def normalised(pixels: torch.Tensor, normalisation: Normalisation) -> torch.Tensor:
    """float32 (pixels - 255 mean) / (255 std), of floats (pixels - mean) / std, per channel of [n, channels, size,
    size]."""
    top = 255 if pixels.dtype == torch.uint8 else 1
    mean, std = _mean_and_std(normalisation, device=pixels.device, top=top)
    return torch.sub(pixels, mean).div_(std)


@lru_cache(maxsize=8)
def _mean_and_std(normalisation: Normalisation, *, device: torch.device, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [channels, 1, 1] each; cached, as copying makes the host wait."""
    mean, std = (
        torch.tensor(each, dtype=torch.float64).mul(top).float().to(device)[:, None, None]
        for each in (normalisation.mean, normalisation.std)
    )
    return mean, std


def erase(values: torch.Tensor, erasures: Sequence[Erasure]) -> None:
    """Erase rectangles of float32 [n, C, size, size] in place."""
    noise = _noise(NOISE_PLACES + values[0].numel(), device=values.device)
    for each in erasures:
        target = values[each.row, :, each.box.top : each.box.bottom, each.box.left : each.box.right]
        if each.mode == "const":
            target.zero_()
        else:
            shape = target.shape if each.mode == "pixel" else (target.shape[0], 1, 1)
            target.copy_(noise[each.noise : each.noise + math.prod(shape)].view(shape))


@lru_cache(maxsize=2)
def _noise(count: int, *, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(normal_numbers(count)).to(device)


def targets(batch: Batch, *, device: torch.device, num_classes: int, label_kind: LabelKind) -> torch.Tensor:
    """Classes, int64 [n]; with several labels or mixing float32 [n, num_classes], 1 per label or its share."""
    labels = batch.labels.to(device, non_blocking=True)
    if label_kind == "single" and batch.mix is None:
        return labels
    if label_kind == "single":
        labels = labels[:, None]
    # An extra class absorbs the padding of rows.
    table = torch.zeros(len(labels), num_classes + 1, device=device)
    table.scatter_(1, torch.where(labels < 0, num_classes, labels), 1.0)
    shares = table[:, :num_classes]
    return shares.contiguous() if batch.mix is None else _weighted(shares, keep=batch.mix.keep)


def _mixed_images(images: torch.Tensor, mix: Mix) -> torch.Tensor:
    """Mix each row with the next, and drop the last; overwrites `images`."""
    if mix.kind == "mixup":
        return _weighted(images, keep=mix.keep)
    if mix.box is not None:
        rows, columns = slice(mix.box.top, mix.box.bottom), slice(mix.box.left, mix.box.right)
        images[:-1, :, rows, columns] = images[1:, :, rows, columns].clone()  # before it is overwritten
    return images[:-1]


def _weighted(rows: torch.Tensor, *, keep: float) -> torch.Tensor:
    """Blend each row with the next: two products and a sum, each rounded, so that bits do not depend on the shape."""
    return (rows[:-1] * keep).add_(rows[1:] * (1 - keep))

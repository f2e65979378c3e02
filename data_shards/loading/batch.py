"""What the data path hands to training, and its last step: uint8 pixels -> the model's input, on the device.

Flip, normalisation and mixing run by the batch: a few passes over memory on a GPU, where a CPU would take 0.5 ms an
image.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from data_shards.loading.mixing import Mix
from data_shards.vocabulary import LabelKind


@dataclass(frozen=True)
class Fault:
    """A damaged sample that was met while a batch was made."""

    shard: str  # its name, fit to be shown
    key: str
    reason: str


@dataclass(frozen=True)
class Batch:
    """One micro-batch of n samples, as it leaves the loader; with `mix`, of one row more.

    That last row is the sample of the next slot of the global batch, wherever that belongs: it is mixed into the row
    before it and is not trained on itself. So the model sees one image less than there are rows.
    """

    images: torch.Tensor  # uint8 [n, size, size, 3]
    mirrored: torch.Tensor  # bool [n]: to be flipped left to right on the device
    labels: torch.Tensor  # int64 [n], or [n, k] filled up with -1 where samples have several labels or none
    counted: torch.Tensor  # bool [n]: False for what evens out the ranks' evaluation batches
    substituted: torch.Tensor  # bool [n]: True where another sample stands in the place of a damaged one
    samples: torch.Tensor  # int64 [n]: number of the sample in the set
    epochs: torch.Tensor  # int64 [n]
    keys: tuple[str, ...]  # WebDataset keys
    faults: tuple[Fault, ...] = ()
    mix: Mix | None = None

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory; torch's DataLoader calls this where there is a GPU."""
        mine = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: it.pin_memory() for name, it in mine.items() if isinstance(it, torch.Tensor)})


@dataclass(frozen=True)
class Normalisation:
    """Pixels x in 0 to 255 become (x - 255 mean) / (255 std), channel by channel."""

    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)


GOOGLES = Normalisation()  # (x - 127.5) / 127.5, in vision_transformer and big_vision alike


def model_input(
    batch: Batch, *, device: torch.device, dtype: torch.dtype, normalisation: Normalisation = GOOGLES
) -> torch.Tensor:
    """Flip, normalise and mix on the device: -> [n, 3, size, size] of `dtype`.

    All is computed in float32 and rounded once.
    """
    pixels = batch.images.to(device, non_blocking=True).permute(0, 3, 1, 2)
    mirrored = batch.mirrored.to(device, non_blocking=True)
    pixels = torch.where(mirrored[:, None, None, None], pixels.flip(3), pixels)
    mean, std = (
        torch.tensor(each, dtype=torch.float64).mul(255).float().to(device)[:, None, None]
        for each in (normalisation.mean, normalisation.std)
    )
    values = (pixels.float() - mean) / std
    if batch.mix is not None:
        values = _mixed_images(values, batch.mix)
    return values.to(dtype).contiguous()


def targets(batch: Batch, *, device: torch.device, num_classes: int, label_kind: LabelKind) -> torch.Tensor:
    """What the loss compares with.

    Returns:
        int64 [n], the classes, where each image has one and nothing is mixed; otherwise float32 [n, num_classes]: 1
        for each label of an image, or the share of each after mixing.
    """
    labels = batch.labels.to(device, non_blocking=True)
    if label_kind == "single" and batch.mix is None:
        return labels
    if label_kind == "single":
        labels = labels[:, None]
    # One class more takes in what only fills a row up.
    table = torch.zeros(len(labels), num_classes + 1, device=device)
    table.scatter_(1, torch.where(labels < 0, num_classes, labels), 1.0)
    shares = table[:, :num_classes]
    return shares.contiguous() if batch.mix is None else _weighted(shares, keep=batch.mix.keep)


def _mixed_images(images: torch.Tensor, mix: Mix) -> torch.Tensor:
    if mix.kind == "mixup":
        return _weighted(images, keep=mix.keep)
    mixed = images[:-1].clone()
    if mix.box is not None:
        rows, columns = slice(mix.box.top, mix.box.bottom), slice(mix.box.left, mix.box.right)
        mixed[:, :, rows, columns] = images[1:, :, rows, columns]
    return mixed


def _weighted(rows: torch.Tensor, *, keep: float) -> torch.Tensor:
    """Each row and the next; two products and a sum, each rounded, so that the bits do not depend on the shape."""
    return rows[:-1] * keep + rows[1:] * (1 - keep)

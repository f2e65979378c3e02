"""The images that a model is looked at with: some of a set of shards, evenly spread over it, or files.

They are decoded and cropped as its evaluation does. Damaged ones are left out. Of shards that are not local files a
drawer reads those alone that this machine has in its cache; a command fetches what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from data_shards.errors import UnreadableImage, UserError
from data_shards.images.decode import USUAL_LIMIT, PixelLimit, read_image
from data_shards.images.transforms import EvalTransform, Pixels
from data_shards.loading.assemble import Access, Assembler
from data_shards.loading.batch import Batch
from data_shards.order import Visits
from data_shards.shard_set import ShardEntry, ShardSet
from data_shards.store.location import is_local
from data_shards.store.store import Store
from data_shards.text import one_line
from model.saved import SavedModelMeta


def transform_of(meta: SavedModelMeta) -> EvalTransform:
    """What the model is shown of an image in evaluation."""
    return EvalTransform(meta.image_size, protocol=meta.eval_protocol, crop_share=meta.eval_crop_share)


def images_of_shards(
    shards: ShardSet,
    *,
    meta: SavedModelMeta,
    count: int,
    store: Store | None,
    limit: PixelLimit = USUAL_LIMIT,
    fetch: Literal["never", "missing"] = "missing",
) -> Batch:
    """At most `count` whole images, evenly spread over the set, at least one; `fetch`: shards that are not here.

    Raises:
        UserError: none of them can be read, or none is here.
    """
    samples = np.unique(np.linspace(0, shards.num_samples - 1, count).round().astype(np.int64))
    ends = np.cumsum([0, *shards.shard_sizes], dtype=np.int64)
    shard = np.searchsorted(ends, samples, side="right") - 1
    if fetch == "never":
        here = [number for number in np.unique(shard).tolist() if _is_here(shards.shards[number], store=store)]
        samples, shard = samples[np.isin(shard, here)], shard[np.isin(shard, here)]
        if not len(samples):
            raise UserError(f"{shards.source}: none of its shards is on this machine")
    zeros = np.zeros_like(samples)
    visits = Visits(epoch=zeros, shard=shard, row=samples - ends[shard], sample=samples, lane=zeros, position=samples)
    access = Access(shards, store=store, pixel_limit=limit, on_corrupt="substitute")  # a damaged one is not counted
    everything = np.ones(len(samples), dtype=np.bool_)
    return whole_rows(Assembler(access).evaluate(visits, counted=everything, transform=transform_of(meta)))


def _is_here(entry: ShardEntry, *, store: Store | None) -> bool:
    return is_local(entry.url) or (store is not None and store.keep(entry) is not None)


def whole_rows(batch: Batch) -> Batch:
    """Without damaged images. UserError: all are."""
    rows = batch.counted.nonzero()[:, 0]
    if not len(rows):
        raise UserError(f"none of the {len(batch.keys)} images could be read ({batch.faults[0].reason})")
    return batch_of(
        batch.images[rows], keys=[batch.keys[row] for row in rows.tolist()], labels=batch.labels[rows].clone()
    )


def images_of_files(
    files: Sequence[Path], *, meta: SavedModelMeta, limit: PixelLimit = USUAL_LIMIT
) -> tuple[Batch, list[str]]:
    """Those that can be read, and a sentence for each other one. UserError: none can."""
    transform, squares, names, faults = transform_of(meta), list[Pixels](), list[str](), list[str]()
    for file in files:
        try:
            squares.append(transform(read_image(file.read_bytes(), limit=limit)))
            names.append(file.name)
        except UnreadableImage as error:
            faults.append(f"{one_line(str(file))}: {error}")
        except OSError as error:
            faults.append(f"{one_line(str(file))}: cannot be read ({error.strerror})")
    if not squares:
        raise UserError(faults[0])
    return batch_of(torch.from_numpy(np.stack(squares)), keys=names), faults


def batch_of(images: torch.Tensor, *, keys: Sequence[str], labels: torch.Tensor | None = None) -> Batch:
    """Pixels uint8 [n, S, S, 3] as a batch, without labels (-1) unless given."""
    count = len(images)
    return Batch(
        images=images,
        mirrored=torch.zeros(count, dtype=torch.bool),
        labels=torch.full((count,), -1) if labels is None else labels,
        counted=torch.ones(count, dtype=torch.bool),
        substituted=torch.zeros(count, dtype=torch.bool),
        samples=torch.arange(count),
        epochs=torch.zeros(count, dtype=torch.int64),
        keys=tuple(keys),
    )

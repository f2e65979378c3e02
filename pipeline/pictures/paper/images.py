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
from data_shards.loading.assemble import Access
from data_shards.loading.batch import Batch, batch_of
from data_shards.text import one_line
from model.saved.model_folder import SavedModelMeta
from pipeline.pictures.held_out_images import read_samples


def transform_of(meta: SavedModelMeta) -> EvalTransform:
    """An image as the model sees it in evaluation."""
    return EvalTransform(meta.image_size, protocol=meta.eval_protocol, crop_share=meta.eval_crop_share)


def images_of_shards(access: Access, *, meta: SavedModelMeta, count: int, fetch: Literal["never", "missing"]) -> Batch:
    """At most `count` whole images, evenly spread over the set, at least one; `fetch`: shards that are not here.
    UserError: none of them can be read, or none is here."""
    samples = np.unique(np.linspace(0, access.shards.num_samples - 1, count).round().astype(np.int64)).tolist()
    batch = read_samples(access, samples=samples, transform=transform_of(meta), fetch=fetch)
    if not batch.keys:
        raise UserError(f"{access.shards.source}: of its images none can be read on this machine")
    return batch


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

"""Images of a held-out set by their numbers, decoded and cropped as evaluation does.

Of shards that are not local files only those are read that this machine has in its cache: drawing must neither wait for
a store nor push out of the cache what training needs. Costs milliseconds an image, and opening the set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data_shards.images.decode import PixelLimit
from data_shards.images.transforms import EvalTransform
from data_shards.loading.assemble import Access, Assembler
from data_shards.loading.batch import Batch
from data_shards.order.sample_order import SampleRefs, refs_in_set_order
from data_shards.reading.opening import open_shards
from data_shards.shards.location import is_local
from pipeline.recipe.vocabulary import OWN_SET
from pipeline.runs.pictures import DrawRequest
from pipeline.stage.batches import eval_transform
from pipeline.stage.stage_data import shards_spec, store_of


def held_out_images(request: DrawRequest, *, set_name: str, samples: Sequence[int]) -> Batch:
    """Those of the `samples` of a held-out set that are whole and on this machine, in this order; it may be none.

    Raises:
        UserError: the set cannot be opened.
        ValueError: the recipe does not name it, or it has no such sample: it is another than it was.
    """
    access = held_out_access(request, set_name=set_name)
    transform = eval_transform(request.recipe.train_stage(request.stage))
    return read_samples(access, samples=samples, transform=transform, fetch="never")


def held_out_access(request: DrawRequest, *, set_name: str) -> Access:
    """A held-out set, opened. UserError: it cannot be; ValueError: the recipe does not name it."""
    recipe, config = request.recipe, request.recipe.train_stage(request.stage)
    named = config.eval if set_name == OWN_SET else config.also_eval.get(set_name)
    if named is None:
        raise ValueError(f"stages.{request.stage} names no held-out shards {set_name!r}")
    store = store_of(recipe, commands="refuse")
    return Access(
        open_shards(shards_spec(named), damaged="report", report=lambda line: None, store=store),
        store=store,
        decoder="auto" if recipe.data.decoder == "gpu" else recipe.data.decoder,  # the GPU is training's
        pixel_limit=PixelLimit(recipe.data.max_image_pixels),
        on_corrupt="substitute",  # a damaged one is not counted
    )


def read_samples(
    access: Access, *, samples: Sequence[int], transform: EvalTransform, fetch: Literal["never", "missing"]
) -> Batch:
    """Those of the `samples` that are whole, in this order; it may be none. `fetch`: shards that are not here, or leave
    their samples out. ValueError: the set has no such sample."""
    numbers = np.asarray(samples, dtype=np.int64)
    ends = np.cumsum([0, *access.shards.shard_sizes], dtype=np.int64)
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < ends[-1]:
        raise ValueError(f"{access.shards.source} has no sample {numbers.max()}: it is another set than was evaluated")
    refs = refs_in_set_order(numbers, shard_starts=ends[:-1])
    if fetch == "never":
        is_here = {number: _is_here(access, number) for number in np.unique(refs.shard).tolist()}
        refs = _only(refs, np.array([is_here[number] for number in refs.shard.tolist()], dtype=np.bool_))
    everything = np.ones(len(refs.sample), dtype=np.bool_)
    batch = Assembler(access).evaluate(refs, counted=everything, transform=transform)
    whole = batch.counted
    rows = {name: getattr(batch, name)[whole] for name in _ROWS}
    keys = tuple(key for key, is_whole in zip(batch.keys, whole.tolist(), strict=True) if is_whole)
    return replace(batch, **rows, keys=keys, faults=())


_ROWS = ("images", "mirrored", "labels", "counted", "substituted", "samples", "epochs")


def _only(refs: SampleRefs, which: NDArray[np.bool_]) -> SampleRefs:
    return SampleRefs(**{name: values[which] for name, values in vars(refs).items()})


def _is_here(access: Access, number: int) -> bool:
    entry = access.shards.shards[number]
    return is_local(entry.url) or (access.store is not None and access.store.keep(entry) is not None)

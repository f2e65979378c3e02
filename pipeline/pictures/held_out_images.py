"""Read held-out images by number, decoded and cropped as in evaluation.

Drawers skip remote shards outside this machine's cache: they must neither wait for a store nor evict what training
needs. Costs milliseconds an image, plus opening the set.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from shardvit.data_shards.images.decode import PixelLimit
from shardvit.data_shards.images.transforms import EvalTransform
from shardvit.data_shards.loading.assemble import Access, Assembler
from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.order.sample_order import SampleRefs, refs_in_set_order
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.shards.location import is_local
from shardvit.model.vocabulary import COLOUR_CHANNELS
from shardvit.pipeline.recipe.vocabulary import OWN_SET
from shardvit.pipeline.runs.pictures import DrawRequest
from shardvit.pipeline.stage.batches import eval_transform
from shardvit.pipeline.stage.stage_data import shards_spec, store_of


def held_out_images(request: DrawRequest, *, set_name: str, samples: Sequence[int]) -> Batch:
    """Read the undamaged `samples` on this machine, in order; raises as `held_out_access` and `read_samples`."""
    access = held_out_access(request, set_name=set_name)
    transform = eval_transform(request.recipe.train_stage(request.stage))
    return read_samples(access, samples=samples, transform=transform, fetch="never")


def held_out_access(request: DrawRequest, *, set_name: str) -> Access:
    """Open a held-out set. UserError if it cannot be opened, ValueError if the recipe does not name it."""
    recipe, config = request.recipe, request.recipe.train_stage(request.stage)
    named = config.eval if set_name == OWN_SET else config.also_eval.get(set_name)
    if named is None:
        raise ValueError(f"stages.{request.stage} names no held-out shards {set_name!r}")
    store = store_of(recipe, commands="refuse")
    shards = open_shards(shards_spec(named), damaged="report", report=lambda line: None, store=store)
    is_colour = recipe.model.channels == COLOUR_CHANNELS
    return Access(
        shards,
        store=store,
        decoder="auto" if recipe.data.decoder == "gpu" else recipe.data.decoder,  # leave the GPU to training
        pixel_limit=PixelLimit(recipe.data.max_image_pixels),
        channels=shards.channels if is_colour else recipe.model.channels,
        on_corrupt="substitute",  # substitutes are not counted: they are dropped below
    )


def read_samples(
    access: Access, *, samples: Sequence[int], transform: EvalTransform, fetch: Literal["never", "missing"]
) -> Batch:
    """Read the undamaged `samples`, in order; possibly none. `fetch`: download uncached remote shards, or skip their
    samples. ValueError if the set lacks a sample, so it is not the evaluated one."""
    numbers = np.asarray(samples, dtype=np.int64)
    ends = np.cumsum([0, *access.shards.shard_sizes], dtype=np.int64)
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < ends[-1]:
        raise ValueError(f"{access.shards.source} has no sample {numbers.max()}: it is another set than was evaluated")
    refs = refs_in_set_order(numbers, shard_starts=ends[:-1])
    if fetch == "never":
        here = [number for number in np.unique(refs.shard).tolist() if _is_here(access, number)]
        refs = SampleRefs(**{name: values[np.isin(refs.shard, here)] for name, values in vars(refs).items()})
    everything = np.ones(len(refs.sample), dtype=np.bool_)
    batch = Assembler(access).evaluate(refs, counted=everything, transform=transform)
    rows = {name: value[batch.counted] for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    keys = tuple(key for key, is_whole in zip(batch.keys, batch.counted.tolist(), strict=True) if is_whole)
    return replace(batch, **rows, keys=keys, faults=())


def _is_here(access: Access, number: int) -> bool:
    entry = access.shards.shards[number]
    return is_local(entry.url) or (access.store is not None and access.store.keep(entry) is not None)

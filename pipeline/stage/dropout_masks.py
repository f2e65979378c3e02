"""Draw random words for dropout masks from (seed, step, place in the global batch, module name).

Places do not depend on the number of processes, so neither do masks. Sample numbers would not do: a batch may repeat a
sample, and mixing uses two. Costs 0.1 us of CPU per word, while a GPU computes the previous micro-batch.
"""

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray

from shardvit.data_shards.order.randomness import hash_words
from shardvit.data_shards.vocabulary import RandomStream
from shardvit.model.layers.dropout import words_of
from shardvit.pipeline.engine.base import Engine
from shardvit.pipeline.recipe.stage_plan import StagePlan


def draw_masks(engine: Engine, *, plan: StagePlan, step: int, place: int) -> None:
    """Draw masks, if the model has any, for a training micro-batch that starts at `place` in the global batch."""
    shared = words_of(engine.module)
    if shared is None:
        return
    places = np.arange(place, place + plan.micro_batch_size)
    words = sample_words(plan.seed, step=step, sites=shared.sites, places=places)
    step_word = int(hash_words(RandomStream.DROPOUT_BY_SAMPLE, plan.seed, step)[0]) >> 32
    shared.give(torch.from_numpy(words).to(engine.device, non_blocking=True), step_word=step_word)


def sample_words(seed: int, *, step: int, sites: list[str], places: NDArray[np.int64]) -> NDArray[np.int32]:
    """Draw two words for each site and place: int32 [sites, places, 2]."""
    keys = np.array([_number(site) for site in sites], dtype=np.uint64)
    words = hash_words(RandomStream.DROPOUT_BY_SAMPLE, seed, step, keys[:, None], places)
    return words.astype("<u8")[..., None].view("<i4").astype(np.int32)


def _number(site: str) -> int:
    return int.from_bytes(hashlib.blake2b(site.encode(), digest_size=8).digest(), "little")

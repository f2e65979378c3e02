"""Random words for dropout masks: a function of (seed, step, place in the global batch, module's name).

Not of the sample's number: a batch may hold a sample twice, and mixing trains on two at once. Places and the order of
images do not depend on the number of processes, so neither do the masks. Costs 0.1 us per word on the CPU, while a GPU
is still busy with the previous micro-batch.
"""

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray

from data_shards.order.randomness import hash_words
from data_shards.vocabulary import RandomStream
from model.layers.dropout import words_of
from pipeline.engine.base import Engine
from pipeline.recipe.stage_plan import StagePlan


def draw_masks(engine: Engine, *, plan: StagePlan, step: int, place: int) -> None:
    """Draw masks before a forward pass in training, for a micro-batch from `place` in the global batch on. Does nothing
    to a model without such masks (rates of 0, `dropout_masks: process`)."""
    shared = words_of(engine.module)
    if shared is None:
        return
    places = np.arange(place, place + plan.micro_batch_size)
    words = sample_words(plan.seed, step=step, sites=shared.sites, places=places)
    step_word = int(hash_words(RandomStream.DROPOUT_BY_SAMPLE, plan.seed, step)[0]) >> 32
    shared.give(torch.from_numpy(words).to(engine.device, non_blocking=True), step_word=step_word)


def sample_words(seed: int, *, step: int, sites: list[str], places: NDArray[np.int64]) -> NDArray[np.int32]:
    """Draw two random words for each site and place: int32 [sites, places, 2]."""
    keys = np.array([_number(site) for site in sites], dtype=np.uint64)
    words = hash_words(RandomStream.DROPOUT_BY_SAMPLE, seed, step, keys[:, None], places)
    return words.astype("<u8")[..., None].view("<i4").astype(np.int32)


def _number(site: str) -> int:
    return int.from_bytes(hashlib.blake2b(site.encode(), digest_size=8).digest(), "little")

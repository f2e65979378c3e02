"""Draw random words for dropout masks from (seed, step, place in the global batch, module name), on the model's device.

Places do not depend on the number of processes, so neither do masks. Sample numbers would not do: a batch may repeat a
sample, and mixing uses two. All sites and samples are drawn by the same 30 integer operations; nothing is copied to the
device after the first micro-batch, and the host waits for nothing.
"""

import functools
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from shardvit.data_shards.order.randomness import INCREMENT, MULTIPLIERS, hash_words
from shardvit.data_shards.vocabulary import RandomStream
from shardvit.model.layers.dropout import words_of
from shardvit.pipeline.engine.base import Engine
from shardvit.pipeline.recipe.stage_plan import StagePlan


def draw_masks(engine: Engine, *, plan: StagePlan, step: int, place: int) -> None:
    """Draw masks, if the model has any, for a training micro-batch that starts at `place` in the global batch."""
    shared = words_of(engine.module)
    if shared is None:
        return
    key = step_key(plan.seed, step=step)
    places = torch.arange(place, place + plan.micro_batch_size, device=engine.device)
    shared.give(sample_words(key, sites=shared.sites, places=places), step_word=key >> 32)


def step_key(seed: int, *, step: int) -> int:
    """64 bits that all of a step's words depend on."""
    return int(hash_words(RandomStream.DROPOUT_BY_SAMPLE, seed, step)[0])


def sample_words(key: int, *, sites: Sequence[str], places: Tensor) -> Tensor:
    """Draw two words for each site and place (int64 [n]) under a step's key: int32 [sites, n, 2]."""
    numbers = _numbers(tuple(sites), device=places.device)[:, None]
    return _hashed(_hashed(numbers ^ _signed(key)) ^ places)[..., None].view(torch.int32)


@functools.lru_cache(maxsize=8)
def _numbers(sites: tuple[str, ...], *, device: torch.device) -> Tensor:
    digests = [hashlib.blake2b(site.encode(), digest_size=8).digest() for site in sites]
    numbers = [int.from_bytes(each, "little", signed=True) for each in digests]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def _hashed(words: Tensor) -> Tensor:
    """`randomness.hash_words` of one more word, in int64: products wrap around alike, and shifts lose the sign."""
    words = words + _signed(int(INCREMENT))
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        words = (words ^ _shifted(words, shift)).mul_(_signed(int(multiplier)))
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    return (words >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word

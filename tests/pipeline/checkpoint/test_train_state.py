"""The loop's state survives JSON to the last bit, and randomness is a function of (seed, step, rank)."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardvit.data_shards.order.randomness import hash_words
from shardvit.data_shards.vocabulary import RandomStream
from shardvit.pipeline.checkpoint.train_state import TrainState, seed_step

FLOATS = st.floats(allow_nan=False)


@given(st.lists(FLOATS), FLOATS, st.integers(0, 2**40))
def test_every_bit_survives_json(losses: list[float], seconds: float, step: int):
    state = TrainState(step=step, training_seconds=seconds, losses_since_log=losses, evaluation={"val/loss": seconds})
    again = TrainState(**json.loads(json.dumps(asdict(state))))
    assert again == state
    assert [value.hex() for value in again.losses_since_log] == [value.hex() for value in losses]


def test_a_loss_that_is_no_number_survives_too():
    again = TrainState(**json.loads(json.dumps(asdict(TrainState(losses_since_log=[math.nan, math.inf])))))
    assert math.isnan(again.losses_since_log[0]) and again.losses_since_log[1] == math.inf


def test_two_states_share_no_list():
    first, second = TrainState(), TrainState()
    first.losses_since_log.append(1.0)
    assert second.losses_since_log == []


def draw(seed: int, step: int, rank: int) -> tuple[float, ...]:
    seed_step(seed, step=step, rank=rank)
    return tuple(torch.rand(4).tolist())


def test_randomness_depends_on_seed_step_and_rank_and_on_nothing_before():
    keys = [(seed, step, rank) for seed in (0, 1) for step in (0, 1, 2, 1000) for rank in (0, 1, 2)]
    drawn = {key: draw(*key) for key in keys}
    assert len(set(drawn.values())) == len(keys)
    for key in reversed(keys):  # in another order, after other draws
        assert draw(*key) == drawn[key]


def test_seeds_are_manual_seeds_for_the_cpu_and_for_this_processs_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [torch.Generator().manual_seed(0) for _ in range(3)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    drawn = draw(3, 7, 2)
    seed = int(hash_words(RandomStream.DROPOUT, 3, 7, 2)[0]) >> 1
    assert [each.initial_seed() for each in gpus] == [0, seed, 0]
    monkeypatch.undo()
    torch.manual_seed(seed)
    assert tuple(torch.rand(4).tolist()) == drawn

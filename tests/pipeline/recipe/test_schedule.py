"""The learning rate against google-research/vision_transformer's formula, against optax, and at its landmarks."""

import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardvit.pipeline.recipe.optimizer import Decay, Schedule


def google(step: int, *, total: int, base: float, decay: str, warmup: int, linear_end: float) -> float:
    """`create_learning_rate_schedule` of vit_jax/utils.py, line by line, in Python's floats."""
    lr = base
    progress = (step - warmup) / float(total - warmup)
    progress = min(max(progress, 0.0), 1.0)
    if decay == "linear":
        lr = linear_end + (lr - linear_end) * (1.0 - progress)
    elif decay == "cosine":
        lr = lr * 0.5 * (1.0 + math.cos(math.pi * progress))
    if warmup:
        lr = lr * min(1.0, step / warmup)
    return lr


@given(
    decay=st.sampled_from(["cosine", "linear"]),
    total=st.integers(1, 400),
    share=st.floats(0, 0.99),
    base=st.floats(1e-5, 10),
    end=st.sampled_from([0.0, 1e-5]),
)
def test_equals_googles_formula(decay: Literal["cosine", "linear"], total: int, share: float, base: float, end: float):
    warmup = int(share * total)
    end = end if decay == "linear" else 0.0  # Google's cosine ends at 0
    schedule = Schedule(peak_lr=base, total_steps=total, warmup_steps=warmup, decay=decay, end_lr=end)
    for step in range(total + 3):
        expected = google(step, total=total, base=base, decay=decay, warmup=warmup, linear_end=end)
        assert schedule(step) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_equals_optax():
    optax = pytest.importorskip("optax")
    cosine = optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup_steps=10, decay_steps=100, end_value=1e-5)
    linear = optax.join_schedules(
        [optax.linear_schedule(0.0, 3e-3, 10), optax.linear_schedule(3e-3, 1e-5, 90)], boundaries=[10]
    )
    for decay, oracle in (("cosine", cosine), ("linear", linear)):
        ours = Schedule(peak_lr=3e-3, total_steps=100, warmup_steps=10, decay=decay, end_lr=1e-5)
        for step in (0, 1, 5, 9, 10, 11, 40, 55, 99, 100):
            assert ours(step) == pytest.approx(float(oracle(step)), rel=2e-6, abs=1e-10)  # optax's float32


def big_vision(step: int, *, total: int, base: float, warmup: int, timescale: int, cooldown: int) -> float:
    """`create_learning_rate_schedule` of big_vision/utils.py with decay_type rsqrt, as published."""
    lr = base / math.sqrt(1 + (step - warmup) / timescale) if warmup <= step else base
    if warmup:
        lr *= min(1.0, step / warmup)
    if cooldown:
        lr *= min(1.0, (total - step) / cooldown)
    return lr


@given(total=st.integers(2, 300), shares=st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)), timescale=st.integers(1, 400))
def test_rsqrt_equals_big_visions_formula(total: int, shares: tuple[float, float], timescale: int):
    warmup, cooldown = (int(share * total) for share in shares)
    schedule = Schedule(
        peak_lr=8e-4,
        total_steps=total,
        warmup_steps=warmup,
        decay="rsqrt",
        timescale_steps=timescale,
        cooldown_steps=cooldown,
    )
    for step in range(total + 1):
        expected = big_vision(step, total=total, base=8e-4, warmup=warmup, timescale=timescale, cooldown=cooldown)
        assert schedule(step) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("end", [0.0, 1e-4])
@pytest.mark.parametrize("decay", ["wsd", "rsqrt", "constant"])
def test_wsd_rsqrt_and_constant_equal_optax_over_50_steps(decay: Decay, end: float):
    """Composed of optax's own: a linear warm-up, the decay, a linear cool-down."""
    optax = pytest.importorskip("optax")
    peak, total, warmup, timescale = 3e-3, 50, 10, 7
    cooldown = 0 if decay == "constant" else 15
    stable = optax.constant_schedule(peak)
    if decay == "rsqrt":
        squared = optax.linear_schedule(1.0, 1.0 + (total - warmup) / timescale, total - warmup)
        stable = lambda step: peak / math.sqrt(float(squared(step)))  # noqa: E731
    share = optax.linear_schedule(1.0, 0.0, max(1, cooldown))
    rise = optax.linear_schedule(0.0, 1.0, warmup)

    def oracle(step: int) -> float:
        decayed = float(stable(max(0, step - warmup)))
        if cooldown and step > total - cooldown:
            decayed = end + (decayed - end) * float(share(step - (total - cooldown)))
        return decayed * float(rise(step))

    ours = Schedule(
        peak_lr=peak,
        total_steps=total,
        warmup_steps=warmup,
        decay=decay,
        end_lr=end if cooldown else 0.0,
        timescale_steps=timescale,
        cooldown_steps=cooldown,
    )
    for step in range(total + 1):
        assert ours(step) == pytest.approx(oracle(step), rel=1e-6, abs=1e-10), step
    assert ours(total) == (end if cooldown else peak)


def test_landmarks():
    schedule = Schedule(peak_lr=1.0, total_steps=100, warmup_steps=20, decay="cosine", end_lr=0.0)
    assert [schedule(step) for step in (0, 10, 20)] == [0.0, 0.5, 1.0]
    assert schedule(60) == pytest.approx(0.5)
    assert schedule(100) == 0.0 and schedule(1000) == 0.0


def test_no_warmup_begins_at_the_peak_and_constant_stays_there():
    assert Schedule(peak_lr=0.3, total_steps=5, warmup_steps=0, decay="linear", end_lr=0.1)(0) == pytest.approx(0.3)
    constant = Schedule(peak_lr=0.3, total_steps=5, warmup_steps=2, decay="constant", end_lr=0.0)
    assert [constant(step) for step in range(6)] == pytest.approx([0.0, 0.15, 0.3, 0.3, 0.3, 0.3])
    assert Schedule(peak_lr=0.3, total_steps=5, warmup_steps=0, decay="linear", end_lr=0.1)(5) == pytest.approx(0.1)

"""Laws of the state's bytes, and the largest micro-batch. Real engines are in test_engine_memory.py."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardvit.pipeline.budget.memory import ZERO_STAGES, State, ZeroStage, state_of
from shardvit.pipeline.engine.zero_config import deepspeed_config
from shardvit.pipeline.recipe.optimizer import OptimizerConfig
from shardvit.pipeline.recipe.schema import EngineConfig
from shardvit.pipeline.recipe.stages.train_stage import EmaConfig
from tests.pipeline.budget.planning import forecast, recipe, stage_plan

ADAMW = OptimizerConfig(name="adamw", lr=0.001)
SGD = OptimizerConfig(name="sgd", lr=0.001)
NUMBER = 300_000_000


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_each_zero_stage_rests_on_less_than_the_one_before(precision, accumulation):
    plan = stage_plan(processes=8, accumulation=accumulation)
    engine = EngineConfig(precision=precision)
    held = [state_of(NUMBER, engine=engine, optimizer=ADAMW, plan=plan, zero_stage=stage) for stage in ZERO_STAGES]
    whole = [each.resting_bytes + each.gradients for each in held]
    assert whole[0] > whole[1] >= whole[2] > whole[3]


def test_sgd_keeps_one_moment_where_adamw_keeps_two():
    plan, engine = stage_plan(processes=2), EngineConfig()
    for stage in ZERO_STAGES:
        adamw, sgd = (
            state_of(NUMBER, engine=engine, optimizer=each, plan=plan, zero_stage=stage).optimizer
            for each in (ADAMW, SGD)
        )
        assert adamw - sgd == 4 * NUMBER / (1 if stage == 0 else 2)


def test_a_moving_average_is_one_moment_more():
    plan, engine = stage_plan(processes=2), EngineConfig()
    for stage in ZERO_STAGES:
        without, with_it = (
            state_of(NUMBER, engine=engine, optimizer=ADAMW, plan=plan, zero_stage=stage, ema=ema).optimizer
            for ema in (None, EmaConfig())
        )
        assert with_it - without == 4 * NUMBER / (1 if stage == 0 else 2)
    plain, averaged = (forecast(recipe("B/16", stage=stage)) for stage in ({}, {"ema": {}}))
    number = plain.cost.parameters
    assert averaged.disk.checkpoint_bytes - plain.disk.checkpoint_bytes == 4 * number
    assert averaged.own.state.resting_bytes > plain.own.state.resting_bytes


def test_buckets_are_as_large_as_the_engines():
    plan, engine = stage_plan(processes=2), EngineConfig()
    settings = deepspeed_config(engine, optimizer=ADAMW, plan=plan)["zero_optimization"]
    one = state_of(NUMBER, engine=engine, optimizer=ADAMW, plan=plan, zero_stage=1)
    assert one.buckets == 2 * 2 * settings["reduce_bucket_size"]
    exact = state_of(NUMBER, engine=EngineConfig(precision="fp32"), optimizer=ADAMW, plan=plan, zero_stage=3)
    assert exact.buckets == 4 * settings["reduce_bucket_size"]


def test_zero_3_gathers_at_most_what_may_live():
    plan, engine = stage_plan(processes=4), EngineConfig()
    small, large = (
        state_of(number, engine=engine, optimizer=ADAMW, plan=plan, zero_stage=3) for number in (10**8, 5 * 10**9)
    )
    assert small.gathered == 2 * (10**8 + 50_000_000)
    assert large.gathered == 2 * (10**9 + 50_000_000)
    alone = state_of(10**8, engine=engine, optimizer=ADAMW, plan=stage_plan(), zero_stage=3)
    assert alone.gathered == 0


def test_accelerate_shards_nothing():
    engine = EngineConfig(backend="accelerate", precision="fp32")
    held = state_of(NUMBER, engine=engine, optimizer=ADAMW, plan=stage_plan(processes=8), zero_stage=0)
    assert held.resting_bytes + held.gradients == 16 * NUMBER
    assert held.peak_bytes(10**9) == 16 * NUMBER + 10**9


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("zero_stage", "offload"),
    [(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "optimizer_and_parameters")],
)
def test_what_is_offloaded_is_the_hosts_and_no_longer_the_gpus(zero_stage: Any, offload: Any, precision: Any):
    plan = stage_plan(processes=4)

    def held(offload: Any) -> State:
        engine = EngineConfig(precision=precision, zero_stage=zero_stage, offload=offload)
        return state_of(NUMBER, engine=engine, optimizer=ADAMW, plan=plan, zero_stage=zero_stage)

    before, after = held("none"), held(offload)
    left = 0 if offload == "optimizer_and_parameters" else before.weights
    assert (before.host, after.optimizer, after.weights) == (0, 0, left)
    gone = before.resting_bytes - after.resting_bytes
    weight = 2 if precision == "bf16" else 4
    assert after.host == gone + (weight + 4) * NUMBER // 4
    assert after.peak_bytes(0) < before.peak_bytes(0) - gone // 2
    # What ZeRO 0 would take is no question of offload.
    engine = EngineConfig(precision=precision, zero_stage=zero_stage, offload=offload)
    assert state_of(NUMBER, engine=engine, optimizer=ADAMW, plan=plan, zero_stage=0).host == 0


@given(
    number=st.integers(10**5, 2 * 10**9),
    processes=st.sampled_from([1, 2, 8, 64]),
    accumulation=st.sampled_from([1, 3]),
    zero_stage=st.sampled_from(ZERO_STAGES),
    image_bytes=st.integers(10**5, 10**9),
    precision=st.sampled_from(["bf16", "fp32"]),
)
def test_the_largest_micro_batch_fits_and_one_image_more_does_not(
    number: int, processes: int, accumulation: int, zero_stage: ZeroStage, image_bytes: int, precision
):
    usable = 80 * 10**9
    plan = stage_plan(processes=processes, accumulation=accumulation)
    held = state_of(number, engine=EngineConfig(precision=precision), optimizer=ADAMW, plan=plan, zero_stage=zero_stage)
    most = held.largest_micro_batch(usable, image_bytes=image_bytes)
    assert held.peak_bytes((most + 1) * image_bytes) > usable
    if most:
        assert held.peak_bytes(most * image_bytes) <= usable


def test_activations_take_more_of_a_precise_or_regularised_stage():
    plain = forecast(recipe("B/16")).cost
    assert forecast(recipe("B/16", engine={"precision": "fp32"})).cost.activation_bytes == 2 * plain.activation_bytes
    dropped = forecast(recipe("B/16", stage={"dropout": 0.1, "dropout_masks": "process"})).cost
    masks = 197 * (768 + 12 * 6 * 768)
    assert dropped.activation_bytes == plain.activation_bytes + masks
    assert forecast(recipe("B/16", stage={"dropout": 0.1})).cost.activation_bytes == plain.activation_bytes
    assert plain.activation_bytes < forecast(recipe("B/16", engine={"backend": "accelerate"})).cost.activation_bytes
    assert forecast(recipe("B/16", stage={"patch_dropout": 0.5})).cost.activation_bytes < 0.6 * plain.activation_bytes


def test_the_finish_with_all_patches_must_fit_too():
    """patch_dropout halves what an image takes, but not where it rests at the end."""
    half = {"patch_dropout": 0.5}
    always, until = (
        forecast(recipe("L/16", batch=512, stage=half | more)).own for more in ({}, {"unmasked_finish": "10%"})
    )
    assert until.peak_bytes["all"] > 1.5 * always.peak_bytes["all"]
    whole = forecast(recipe("L/16", batch=512)).own
    assert until.peak_bytes == whole.peak_bytes

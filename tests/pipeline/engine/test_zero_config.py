"""The dictionary for DeepSpeed: what the recipe says, and each costly or unsafe default set on purpose."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardvit.pipeline.engine.zero_config import bucket_elements, deepspeed_config, overlaps
from shardvit.pipeline.recipe.optimizer import OptimizerConfig, Schedule
from shardvit.pipeline.recipe.schema import EngineConfig
from shardvit.pipeline.recipe.stage_plan import StagePlan

PLAN = StagePlan(
    world_size=2,
    global_batch_images=64,
    micro_batch_size=8,
    accumulation_steps=4,
    lanes=64,
    total_steps=10,
    schedule=Schedule(),
    log_steps=1,
    eval_steps=1,
    save_steps=1,
    samples_per_epoch=100,
)


def config(*, clip: float = 1.0, **engine: Any) -> dict[str, Any]:
    optimizer = OptimizerConfig(name="adamw", lr=0.1, clip_grad_norm=clip)
    return deepspeed_config(EngineConfig(**engine), optimizer=optimizer, plan=PLAN)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_batch_and_stage(stage: int):
    got = config(zero_stage=stage)
    assert got["zero_optimization"]["stage"] == (1 if stage == 2 else stage)  # we shard the gradients
    assert config(zero_stage=stage, precision="fp16")["zero_optimization"]["stage"] == stage
    assert got["train_batch_size"] == 64
    assert got["train_micro_batch_size_per_gpu"] * got["gradient_accumulation_steps"] * PLAN.world_size == 64
    # A ViT-B has 86M parameters: a bucket must not swallow a whole model of some size, or nothing overlaps.
    assert 1e6 < got["zero_optimization"]["reduce_bucket_size"] < 86e6


def test_batch_follows_the_plan():
    plan = replace(PLAN, global_batch_images=128, accumulation_steps=8)
    got = deepspeed_config(EngineConfig(), optimizer=OptimizerConfig(name="sgd", lr=1), plan=plan)
    assert (got["train_batch_size"], got["gradient_accumulation_steps"]) == (128, 8)


def test_one_precision_at_a_time():
    assert config(precision="bf16")["bf16"]["enabled"] and "fp16" not in config(precision="bf16")
    half = config(precision="fp16")
    assert half["fp16"]["enabled"] and half["fp16"]["loss_scale"] == 0 and "bf16" not in half  # 0: dynamic
    assert not {"bf16", "fp16"} & set(config(precision="fp32"))


FLAT = [(stage, precision) for stage in (1, 2) for precision in ("bf16", "fp32")]
DEEPSPEEDS = [(3, "bf16"), (3, "fp32"), (3, "fp16"), (1, "fp16"), (2, "fp16")]


@pytest.mark.parametrize("clip", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("stage", "precision"), [*FLAT, *DEEPSPEEDS])
def test_either_we_clip_and_check_or_deepspeed_does(stage: int, precision: Any, clip: float):
    got = config(clip=clip, zero_stage=stage, precision=precision)
    ours = (stage, precision) in FLAT
    assert got["gradient_clipping"] == (0.0 if ours else clip)
    assert got["zero_optimization"].get("compute_grad_norm", True) is not ours
    if precision == "bf16":
        assert got["bf16"]["check_grad_overflow"] is not ours


@pytest.mark.parametrize(("stage", "precision"), [*FLAT, *DEEPSPEEDS])
def test_no_timer_synchronises_the_device(stage: int, precision: Any):
    assert config(zero_stage=stage, precision=precision)["timers"] == {"throughput": {"enabled": False}}


@pytest.mark.parametrize(
    ("engine", "alone", "several"),
    [
        ({}, False, True),
        ({"overlap": "on"}, False, True),
        ({"overlap": "off"}, False, False),
        ({"precision": "fp16"}, False, True),
        ({"precision": "fp16", "overlap": "on"}, True, True),
        ({"precision": "fp16", "overlap": "off"}, False, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_are_averaged_during_the_backward_pass_where_there_is_somebody_to_send_to(
    engine: dict[str, Any], alone: bool, several: bool, stage: int
):
    made = EngineConfig(zero_stage=stage, **engine)
    ours = "precision" not in engine
    for processes, expected in ((1, alone), (2, several)):
        plan = replace(PLAN, world_size=processes, global_batch_images=32 * processes)
        assert overlaps(made, world_size=processes) is expected
        got = deepspeed_config(made, optimizer=OptimizerConfig(name="sgd", lr=1), plan=plan)["zero_optimization"]
        assert got["overlap_comm"] is (expected and not ours)  # it synchronises the device after each backward pass
        assert got["contiguous_gradients"] is not ours  # its hooks copy each gradient


def test_buckets_are_as_large_as_the_recipe_says():
    got = config(bucket_elements=1000)["zero_optimization"]
    assert got["reduce_bucket_size"] == got["allgather_bucket_size"] == 1000


def test_buckets_grow_with_the_processes_where_a_ring_passes_them_on():
    for engine, processes, expected in (
        ({}, 2, 25_000_000),
        ({}, 95, 25_000_000),
        ({}, 1024, 2**18 * 1024),
        ({"precision": "fp16"}, 1024, 25_000_000),
        ({"zero_stage": 3}, 1024, 25_000_000),
        ({"bucket_elements": 1000}, 1024, 1000),
    ):
        assert bucket_elements(EngineConfig(**engine), world_size=processes) == expected


def test_no_schedule_and_no_optimizer_of_deepspeeds_own():
    assert not {"optimizer", "scheduler"} & set(config())
    assert config()["steps_per_print"] is None and config()["wall_clock_breakdown"] is False


def test_what_is_offloaded_is_in_host_memory_pinned_only_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch):
    zero = config(zero_stage=2)["zero_optimization"]
    assert not {"offload_optimizer", "offload_param"} & set(zero)
    for on_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda on_gpu=on_gpu: on_gpu)
        where = {"device": "cpu", "pin_memory": on_gpu}
        zero = config(zero_stage=2, offload="optimizer")["zero_optimization"]
        assert zero["offload_optimizer"] == where and "offload_param" not in zero
        zero = config(zero_stage=3, offload="optimizer_and_parameters")["zero_optimization"]
        assert zero["offload_optimizer"] == zero["offload_param"] == where
    assert config()["zero_force_ds_cpu_optimizer"] is False

"""The dictionary for DeepSpeed: what the recipe says, and each costly or unsafe default set on purpose."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.engine.zero_config import deepspeed_config
from pipeline.recipe.optimizer import OptimizerConfig
from pipeline.recipe.schedule import Schedule
from pipeline.recipe.schema import EngineConfig
from pipeline.recipe.stage_plan import StagePlan

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
    assert got["zero_optimization"]["stage"] == stage
    assert got["train_batch_size"] == 64
    assert got["train_micro_batch_size_per_gpu"] * got["gradient_accumulation_steps"] * PLAN.world_size == 64
    assert got["zero_optimization"]["overlap_comm"] is True
    # A ViT-S has 22M parameters: a bucket must not swallow a whole model of some size, or nothing overlaps.
    assert 1e6 < got["zero_optimization"]["reduce_bucket_size"] < 86e6


def test_batch_follows_the_plan():
    plan = replace(PLAN, global_batch_images=128, accumulation_steps=8)
    got = deepspeed_config(EngineConfig(), optimizer=OptimizerConfig(name="sgd", lr=1), plan=plan)
    assert (got["train_batch_size"], got["gradient_accumulation_steps"]) == (128, 8)


def test_one_precision_at_a_time():
    assert config(precision="bf16")["bf16"] == {"enabled": True} and "fp16" not in config(precision="bf16")
    half = config(precision="fp16")
    assert half["fp16"]["enabled"] and half["fp16"]["loss_scale"] == 0 and "bf16" not in half  # 0: dynamic
    assert not {"bf16", "fp16"} & set(config(precision="fp32"))


@pytest.mark.parametrize("clip", [0.0, 0.5, 1.0])
def test_clipping_is_always_said(clip: float):
    assert config(clip=clip)["gradient_clipping"] == clip


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

"""Recipe -> DeepSpeed's configuration dictionary (ZeRO 1 to 3). Pure; there is no JSON file, no second source of truth.

DeepSpeed's defaults that cost speed or safety are overridden, each with its reason.
"""

from __future__ import annotations

from typing import Any

import torch

from pipeline.recipe.optimizer import OptimizerConfig
from pipeline.recipe.schema import EngineConfig
from pipeline.recipe.stage_plan import StagePlan

# 25M elements. DeepSpeed's default of 5e8 exceeds a whole ViT-L: one bucket, reduced only after the backward pass.
_BUCKET_ELEMENTS = 25_000_000


def deepspeed_config(engine: EngineConfig, *, optimizer: OptimizerConfig, plan: StagePlan) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize`."""
    config: dict[str, Any] = {
        "train_batch_size": plan.global_batch_images,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.accumulation_steps,
        "gradient_clipping": optimizer.clip_grad_norm,  # explicit: the default became 1.0 in 2026
        "zero_optimization": {
            "stage": engine.zero_stage,
            "reduce_bucket_size": _BUCKET_ELEMENTS,
            "allgather_bucket_size": _BUCKET_ELEMENTS,
            "overlap_comm": True,  # off by default for stages 1 and 2
            "contiguous_gradients": True,
            **_offload(engine),
        },
        # SGD is not on DeepSpeed's list of tested optimizers, though it shards like AdamW.
        "zero_allow_untested_optimizer": True,
        # We bring torch's optimizer; DeepSpeed would otherwise insist on compiling its own for offload.
        "zero_force_ds_cpu_optimizer": False,
        # Never: the loop prints its own lines, and a print makes every rank read the clock and the loss.
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
    match engine.precision:
        case "bf16":
            config["bf16"] = {"enabled": True}  # float32 master weights, and a check for overflow, by default
        case "fp16":
            config["fp16"] = {"enabled": True, "loss_scale": 0}  # 0: dynamic
        case "fp32":
            pass
    return config


def _offload(engine: EngineConfig) -> dict[str, Any]:
    """What of `zero_optimization` keeps state in host memory; pinned where a GPU copies from it."""
    if engine.offload == "none":
        return {}
    where = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    parameters = engine.offload == "optimizer_and_parameters"
    return {"offload_optimizer": where, **({"offload_param": where} if parameters else {})}

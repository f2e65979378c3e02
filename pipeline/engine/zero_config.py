"""Build DeepSpeed's configuration from the recipe (ZeRO 1 to 3), overriding defaults that cost speed or safety."""

from typing import Any

from shardvit.pipeline.recipe.optimizer import OptimizerConfig
from shardvit.pipeline.recipe.schema import EngineConfig
from shardvit.pipeline.recipe.stage_plan import StagePlan

_BUCKET_ELEMENTS = 25_000_000


def takes_flat_step(engine: EngineConfig) -> bool:
    """True if `sharded_step` averages, checks, clips and applies gradients instead of DeepSpeed. Not for fp16
    (DeepSpeed's loss scale), ZeRO 3 (its own parameter pieces) or offload (state off the device)."""
    return engine.zero_stage in {1, 2} and engine.precision != "fp16" and engine.offload == "none"


def overlaps(engine: EngineConfig, *, world_size: int) -> bool:
    """True if gradients are averaged during the backward pass."""
    if engine.overlap == "auto" or takes_flat_step(engine):
        return world_size > 1 and engine.overlap != "off"
    return engine.overlap == "on"


def bucket_elements(engine: EngineConfig, *, world_size: int) -> int:
    """Elements averaged per message."""
    if engine.bucket_elements != "auto":
        return engine.bucket_elements
    return max(_BUCKET_ELEMENTS, least_piece_elements(engine) * world_size)


def least_piece_elements(engine: EngineConfig) -> int:
    """Elements of a message for each process, at least. A ring of n processes passes a message on n - 1 times, which
    pays off for pieces of NCCL's chunk size, 512 KiB; trees (all-reduce) take smaller ones."""
    return 1 << 18 if takes_flat_step(engine) and engine.bucket_elements == "auto" else 0


def deepspeed_config(engine: EngineConfig, *, optimizer: OptimizerConfig, plan: StagePlan) -> dict[str, Any]:
    """Build the `config` of `deepspeed.initialize`."""
    flat = takes_flat_step(engine)
    config: dict[str, Any] = {
        "train_batch_size": plan.global_batch_images,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.accumulation_steps,
        "gradient_clipping": 0.0 if flat else optimizer.clip_grad_norm,  # explicit: the default became 1.0 in 2026
        "zero_optimization": {
            # `sharded_step` averages, so that DeepSpeed needs no hooks; it keeps the state alike under ZeRO 1 and 2.
            "stage": 1 if flat else engine.zero_stage,
            # DeepSpeed's default of 5e8 exceeds a whole ViT-L: one bucket, reduced only after the backward pass.
            "reduce_bucket_size": bucket_elements(engine, world_size=plan.world_size),
            "allgather_bucket_size": bucket_elements(engine, world_size=plan.world_size),
            # Costs a device synchronisation after each backward pass, so off in a single process.
            "overlap_comm": not flat and overlaps(engine, world_size=plan.world_size),
            "contiguous_gradients": not flat,  # False: no hooks
            **_offload(engine),
        },
        # DeepSpeed lists SGD as untested, though it shards like AdamW.
        "zero_allow_untested_optimizer": True,
        # For offload, DeepSpeed would otherwise insist on compiling its own optimizer; we pass torch's.
        "zero_force_ds_cpu_optimizer": False,
        # Never: the loop logs itself, and a print makes every rank read the clock and the loss.
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},  # it synchronises the device twice a step
    }
    if flat:
        config["zero_optimization"]["compute_grad_norm"] = False
    if engine.precision == "bf16":
        config["bf16"] = {"enabled": True, "check_grad_overflow": not flat}  # with float32 master weights
    if engine.precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 0}  # 0: dynamic
    return config


def _offload(engine: EngineConfig) -> dict[str, Any]:
    """Keys of `zero_optimization` that keep state in host memory, pinned if there is a GPU."""
    if engine.offload == "none":
        return {}
    import torch  # lazy: `shardvit plan` imports this file

    where = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    parameters = engine.offload == "optimizer_and_parameters"
    return {"offload_optimizer": where, **({"offload_param": where} if parameters else {})}

"""Bytes on one GPU, by ZeRO stage: at rest, within a step, and the largest micro-batch that fits.

The formulas are those of DeepSpeed 0.19 as `zero_config` sets it and, for ZeRO 0 and accelerate, of torch's DDP, read
in their sources and compared with real engines on two processes (tests/pipeline/budget/test_engine_memory.py). Unlike
the textbook's: without accumulation ZeRO 1 too keeps only its own share of the gradients; a step holds gradients up to
three times (averaged, flattened, in float32); and ZeRO 3 keeps gathered weights through the whole backward pass, unless
they exceed 10^9. Not included: activations (`cost`), the reserve for CUDA and NCCL (`gpus`).

N parameters, n processes, w bytes of a weight in the forward pass (2, or 4 in fp32), b the bucket's bytes:

                 rests there       gradients            buckets  gathered  in the step, gradients included
    ZeRO 0       wN + 12N          wN, always there     -        -         wN + 4N
    ZeRO 0 fp32  4N + 8N           4N, always there     -        -         4N
    ZeRO 1       wN + 12N/n        wN/n; wN (*)         3b       -         2wN/n + 4N/n; fp32: 8N/n
       at once   wN + 12N/n        wN                   -        -         2wN, or 6N/n if that is more
    ZeRO 2       wN + 12N/n        wN/n; 2wN/n (*)      3b       -         the same
    ZeRO 3       wN/n + 12N/n      wN/n, always there   b        wN        the same, and b
    accelerate   4N + 8N           4N, always there     -        2N casts  4N

(*) with accumulation. 3b: two buckets that are filled in turn (one with `engine.overlap: off`) and the message. At
once: averaged after the backward pass (ZeRO 1 where nothing overlaps), from one flat copy. 12N: float32 masters (4) and
AdamW's two moments (8); others: `recipe.vocabulary`. A moving average of the weights (the stage's `ema`) is one
moment more. With `engine.offload` the share of 12N is in host memory, and in float32 the gradients of a step; with
parameters wN/n too. That part is read in DeepSpeed's source alone: on a CPU nothing tells its host memory from its
device's. One process of ZeRO 0 has no DDP, which keeps the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pipeline.engine.zero_config import deepspeed_config, reduces_at_once
from pipeline.recipe.optimizer import OptimizerConfig
from pipeline.recipe.schema import EngineConfig
from pipeline.recipe.stage import EmaConfig
from pipeline.recipe.stage_plan import StagePlan
from pipeline.recipe.vocabulary import AVERAGE_BYTES, MASTER_BYTES, WEIGHT_BYTES

ZeroStage = Literal[0, 1, 2, 3]
ZERO_STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)
Activations = Literal["all", "checkpointed"]

# Defaults of DeepSpeed 0.19 that `zero_config` leaves.
MAX_LIVE_ELEMENTS = 1_000_000_000  # stage3_max_live_parameters
_PREFETCH_ELEMENTS = 50_000_000  # stage3_prefetch_bucket_size


@dataclass(frozen=True)
class State:
    """Bytes on one GPU apart from activations."""

    weights: int  # kept on this GPU for the forward pass
    optimizer: int  # master weights, moments and the moving average of the weights
    gradients: int  # the most of them in the backward pass
    early_gradients: int  # of them, what exists already while the activations are at their peak
    buckets: int  # buffers in which gradients are averaged during the backward pass
    gathered: int  # other GPUs' weights during the forward and backward pass (ZeRO 3), or weights cast by autocast
    step: int  # all gradients and copies of them while they are averaged or the optimizer steps
    host: int = 0  # in host memory (`engine.offload`)

    @property
    def resting_bytes(self) -> int:
        """Between two steps, apart from gradients and buckets."""
        return self.weights + self.optimizer

    @property
    def passing_bytes(self) -> int:
        """Temporary bytes of a step, beside weights, optimizer and gradients."""
        return max(self.buckets + self.gathered, self.step - self.gradients)

    def backward_peak_bytes(self, activation_bytes: int) -> int:
        """The most before the optimizer steps, with one micro-batch's activations: gradients appear as activations are
        freed, unless they exist from earlier micro-batches."""
        passes = max(self.early_gradients + activation_bytes, self.gradients)
        return self.resting_bytes + self.buckets + self.gathered + passes

    def peak_bytes(self, activation_bytes: int) -> int:
        return max(self.backward_peak_bytes(activation_bytes), self.resting_bytes + self.step)

    def largest_micro_batch(self, usable_bytes: int, *, image_bytes: int) -> int:
        """The most images of one forward pass whose peak is within `usable_bytes`; 0: none."""
        if self.peak_bytes(0) > usable_bytes:
            return 0
        used = self.resting_bytes + self.buckets + self.gathered + self.early_gradients
        return max(0, usable_bytes - used) // image_bytes


def state_of(
    num_parameters: int,
    *,
    engine: EngineConfig,
    optimizer: OptimizerConfig,
    plan: StagePlan,
    zero_stage: ZeroStage,
    ema: EmaConfig | None = None,
) -> State:
    """The state under one ZeRO stage, whatever the recipe's own is."""
    number, share = num_parameters, -(-num_parameters // plan.world_size)
    each = optimizer.bytes_per_parameter + (AVERAGE_BYTES if ema else 0)
    weight = WEIGHT_BYTES[engine.precision]
    whole_is_early = weight * number if plan.accumulation_steps > 1 else 0
    if engine.backend == "accelerate":
        cast = 0 if engine.precision == "fp32" else 2 * number
        gradients = MASTER_BYTES * number
        return State(gradients, round(each * number), gradients, gradients, buckets=0, gathered=cast, step=gradients)
    settings = deepspeed_config(engine.model_copy(update={"zero_stage": zero_stage}), optimizer=optimizer, plan=plan)[
        "zero_optimization"
    ]
    bucket = weight * settings["reduce_bucket_size"]
    step = (2 * weight + (0 if engine.precision == "fp32" else MASTER_BYTES)) * share
    match zero_stage:
        case 0:
            masters = 0 if engine.precision == "fp32" else MASTER_BYTES
            gradients = weight * number
            return State(
                weights=weight * number,
                optimizer=round((masters + each) * number),
                gradients=gradients,
                early_gradients=gradients if plan.world_size > 1 else whole_is_early,
                buckets=0,
                gathered=0,
                step=gradients + masters * number,
            )
        case 1 if reduces_at_once(engine.model_copy(update={"zero_stage": 1}), world_size=plan.world_size):
            return State(
                weights=weight * number,
                optimizer=round((MASTER_BYTES + each) * share),
                gradients=weight * number,
                early_gradients=whole_is_early,
                buckets=0,
                gathered=0,
                step=max(2 * weight * number, step - weight * share),
            )
        case 1 | 2:
            sharded = weight * share
            held = State(
                weights=weight * number,
                optimizer=round((MASTER_BYTES + each) * share),
                gradients=sharded if not whole_is_early else whole_is_early if zero_stage == 1 else 2 * sharded,
                early_gradients=whole_is_early if zero_stage == 1 else sharded if whole_is_early else 0,
                buckets=bucket * (3 if settings["overlap_comm"] else 2),
                gathered=0,
                step=step,
            )
        case 3:
            gathered = min(number, MAX_LIVE_ELEMENTS) + min(number, _PREFETCH_ELEMENTS)
            held = State(
                weights=weight * share,
                optimizer=round((MASTER_BYTES + each) * share),
                gradients=weight * share,
                early_gradients=weight * share,
                buckets=bucket,
                gathered=weight * gathered if plan.world_size > 1 else 0,
                step=step + bucket,
            )
    return _offloaded(held, engine=engine, share=share, zero_stage=zero_stage)


def _offloaded(held: State, *, engine: EngineConfig, share: int, zero_stage: ZeroStage) -> State:
    """Bytes left on the GPU: the CPU's optimizer takes gradients in float32, and ZeRO 3 keeps its share of them where
    it steps."""
    if engine.offload == "none":
        return held
    weight = WEIGHT_BYTES[engine.precision]
    left = replace(held, optimizer=0, step=held.gradients, host=held.optimizer + (weight + MASTER_BYTES) * share)
    if zero_stage == 3:
        left = replace(left, gradients=0, early_gradients=0, step=held.buckets)
        if engine.offload == "optimizer_and_parameters":
            left = replace(left, weights=0, host=left.host + held.weights)
    return left

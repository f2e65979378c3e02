"""Bytes on one GPU by ZeRO stage, at rest and within a step, and the largest micro-batch that fits.

The formulas follow DeepSpeed 0.19 as `zero_config` sets it up and, for ZeRO 0 and accelerate, torch's DDP: read in
their sources and checked on real engines with two processes (tests/pipeline/budget/test_engine_memory.py). They differ
from the textbook: without accumulation ZeRO 1 keeps only its share of the gradients; a step holds gradients up to three
times (averaged, flattened, in float32); ZeRO 3 keeps gathered weights through the whole backward pass, unless they
exceed 10^9. Activations (`cost`) and the reserve for CUDA and NCCL (`gpus`) come on top.

N parameters, n processes, w bytes of a weight in the forward pass (2, or 4 in fp32), b the bucket's bytes:

                 rests there       gradients            buckets  gathered  in the step, gradients included
    ZeRO 0       wN + 12N          wN, always there     -        -         wN + 4N
    ZeRO 0 fp32  4N + 8N           4N, always there     -        -         4N
    ZeRO 1       wN + 12N/n        wN/n; wN (*)         3b       -         2wN/n + 4N/n; fp32: 8N/n
       at once   wN + 12N/n        wN                   -        -         2wN, or 6N/n if that is more
    ZeRO 2       wN + 12N/n        wN/n; 2wN/n (*)      3b       -         the same
    ZeRO 3       wN/n + 12N/n      wN/n, always there   b        wN        the same, and b
    accelerate   4N + 8N           4N, always there     -        2N casts  4N

(*) with accumulation. 3b: two buckets filled in turn (one with `engine.overlap: off`) and the message. At once:
averaged after the backward pass (ZeRO 1 without overlap), from one flat copy. 12N: float32 masters (4) and AdamW's two
moments (8); other optimizers: `recipe.vocabulary`. A moving average of the weights (`ema`) counts as one more moment.
`engine.offload` moves the share of 12N and a step's gradients, in float32, to host memory; with parameters also wN/n.
That part is read from DeepSpeed's source only: on a CPU, host and device memory are the same. A single ZeRO 0 process
has no DDP to keep its gradients.
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

    weights: int  # kept here for the forward pass
    optimizer: int  # master weights, moments and the moving average of the weights
    gradients: int  # at most, in the backward pass
    early_gradients: int  # of them, already there while activations are at their peak
    step: int  # gradients and copies of them while they are averaged or the optimizer steps
    buckets: int = 0  # buffers in which gradients are averaged during the backward pass
    gathered: int = 0  # other GPUs' weights during forward and backward pass (ZeRO 3), or weights cast by autocast
    host: int = 0  # in host memory (`engine.offload`)

    @property
    def resting_bytes(self) -> int:
        """Between two steps, without gradients and buckets."""
        return self.weights + self.optimizer

    @property
    def passing_bytes(self) -> int:
        """Temporary, on top of weights, optimizer and gradients."""
        return max(self.buckets + self.gathered, self.step - self.gradients)

    def backward_peak_bytes(self, activation_bytes: int) -> int:
        """Peak before the optimizer steps, for one micro-batch's activations: gradients appear as activations are
        freed, unless earlier micro-batches left them."""
        passes = max(self.early_gradients + activation_bytes, self.gradients)
        return self.resting_bytes + self.buckets + self.gathered + passes

    def peak_bytes(self, activation_bytes: int) -> int:
        return max(self.backward_peak_bytes(activation_bytes), self.resting_bytes + self.step)

    def largest_micro_batch(self, usable_bytes: int, *, image_bytes: int) -> int:
        """Most images in a forward pass whose peak is within `usable_bytes`; 0: none fits."""
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
    """Count the state under one ZeRO stage, which need not be the recipe's."""
    each = optimizer.bytes_per_parameter + (AVERAGE_BYTES if ema else 0)
    weight, several = WEIGHT_BYTES[engine.precision], plan.world_size > 1
    accumulates = plan.accumulation_steps > 1
    if zero_stage == 0:
        autocast = engine.backend == "accelerate"
        weight = MASTER_BYTES if autocast else weight
        masters = 0 if weight == MASTER_BYTES else MASTER_BYTES
        gradients = weight * num_parameters
        return State(
            weights=weight * num_parameters,
            optimizer=round((masters + each) * num_parameters),
            gradients=gradients,
            early_gradients=gradients if autocast or several or accumulates else 0,
            gathered=2 * num_parameters if autocast and engine.precision != "fp32" else 0,
            step=gradients + masters * num_parameters,
        )
    engine = engine.model_copy(update={"zero_stage": zero_stage})
    settings = deepspeed_config(engine, optimizer=optimizer, plan=plan)["zero_optimization"]
    share = -(-num_parameters // plan.world_size)
    whole, sharded, bucket = weight * num_parameters, weight * share, weight * settings["reduce_bucket_size"]
    step = 2 * sharded + (0 if engine.precision == "fp32" else MASTER_BYTES * share)
    masters_and_moments = round((MASTER_BYTES + each) * share)
    if zero_stage == 3:
        gathered = min(num_parameters, MAX_LIVE_ELEMENTS) + min(num_parameters, _PREFETCH_ELEMENTS)
        gathered = weight * gathered if several else 0
        held = State(sharded, masters_and_moments, sharded, sharded, step + bucket, bucket, gathered)
    elif zero_stage == 1 and reduces_at_once(engine, world_size=plan.world_size):
        early = whole if accumulates else 0
        return State(whole, masters_and_moments, whole, early, step=max(2 * whole, step - sharded))
    else:
        gradients, early = sharded, 0
        if accumulates:
            gradients, early = (whole, whole) if zero_stage == 1 else (2 * sharded, sharded)
        buckets = bucket * (3 if settings["overlap_comm"] else 2)
        held = State(whole, masters_and_moments, gradients, early, step, buckets)
    return _offloaded(held, engine=engine, share=share)


def _offloaded(held: State, *, engine: EngineConfig, share: int) -> State:
    """Count what stays on the GPU; the CPU's optimizer takes gradients in float32, and ZeRO 3 keeps them there."""
    if engine.offload == "none":
        return held
    host = held.optimizer + (WEIGHT_BYTES[engine.precision] + MASTER_BYTES) * share
    if engine.zero_stage < 3:
        return replace(held, optimizer=0, step=held.gradients, host=host)
    left = replace(held, optimizer=0, gradients=0, early_gradients=0, step=held.buckets, host=host)
    if engine.offload == "optimizer_and_parameters":
        left = replace(left, weights=0, host=host + held.weights)
    return left

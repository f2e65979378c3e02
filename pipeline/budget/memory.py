"""Count bytes on one GPU by ZeRO stage, at rest and within a step, and the largest micro-batch that fits.

Formulas from the sources of DeepSpeed 0.19 (as set up by `zero_config`) and torch's DDP (ZeRO 0 and accelerate),
checked on real engines with two processes (tests/pipeline/budget/test_engine_memory.py). Unlike the textbook: without
accumulation ZeRO 1 keeps only its share of gradients; a step holds gradients up to three times (averaged, flattened,
float32); ZeRO 3 keeps up to 10^9 gathered weights through the whole backward pass. Activations (`cost`) and the reserve
for CUDA and NCCL (`gpus`) come on top.

N parameters, n processes, w bytes per weight in the forward pass (2, or 4 in fp32), b bytes per bucket:

                 rests there       gradients            buckets  gathered  in the step, gradients included
    ZeRO 0       wN + 12N          wN, always there     -        -         wN + 4N
    ZeRO 0 fp32  4N + 8N           4N, always there     -        -         4N
    ZeRO 1       wN + 12N/n        wN/n; wN + wN/n (*)  2b       -         wN/n + 4N/n; fp32: 4N/n
    ZeRO 2       wN + 12N/n        wN/n; (w + 4)N/n (*) 2b       -         the same; 4N/n (*)
       at once   wN + 12N/n        wN; ZeRO 2: + 4N/n (*)  -     -         2wN, or as above if that is more
       DeepSpeed wN + 12N/n        wN/n; ZeRO 1 wN, ZeRO 2 2wN/n (*)  3b   2wN/n + 4N/n; fp32: 8N/n
    ZeRO 3       wN/n + 12N/n      wN/n, always there   b        wN        the same, and b
    accelerate   4N + 8N           4N, always there     -        2N casts  4N

(*) with accumulation. 2b: a bucket's gradients and their flat copy (`sharded_step`); once another is on its way, the
activations of some blocks are gone. At once: averaged after the backward pass (`engine.overlap: off`, or one process)
from one flat copy. DeepSpeed: fp16 and offload, with two alternating buckets (one with `engine.overlap: off`) and the
message. 12N: float32 masters (4) and AdamW's two moments (8); other optimizers: `recipe.vocabulary`, and Muon joins its
matrices in 4N/n more of a step of ZeRO 1 and 2. `ema` counts as one more moment. `engine.offload` moves the share of
12N and a step's float32 gradients to host memory, with parameters also wN/n; this is from DeepSpeed's source only, as a
CPU test cannot tell host from device memory. A single ZeRO 0 process has no DDP to keep its gradients.

A background save copies to host memory: each process its share of masters, moments and averages; rank 0 also the
forward pass's weights under ZeRO 1 and 2, and everything under ZeRO 0 and accelerate. The copy overlaps with the next
step's passes (`engine.host_copy`); the rest is the stall. Seconds are computed, not measured, and exclude the
processes' agreement. A blocking save waits for the disk, which is not modelled.
"""

from dataclasses import dataclass, replace
from typing import Literal

from shardvit.pipeline.budget.gpus import GB, Gpu
from shardvit.pipeline.engine.zero_config import deepspeed_config, overlaps, takes_flat_step
from shardvit.pipeline.recipe.optimizer import OptimizerConfig
from shardvit.pipeline.recipe.schema import EngineConfig
from shardvit.pipeline.recipe.stage_plan import StagePlan
from shardvit.pipeline.recipe.stages.train_stage import EmaConfig
from shardvit.pipeline.recipe.vocabulary import AVERAGE_BYTES, MASTER_BYTES, OPTIMIZERS, WEIGHT_BYTES

ZeroStage = Literal[0, 1, 2, 3]
ZERO_STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)
Activations = Literal["all", "checkpointed"]

# DeepSpeed 0.19's defaults, unchanged by `zero_config`.
MAX_LIVE_ELEMENTS = 1_000_000_000  # stage3_max_live_parameters
_PREFETCH_ELEMENTS = 50_000_000  # stage3_prefetch_bucket_size

# Of the data sheet's bandwidth in one direction, into page-locked memory: CUDA's bandwidthTest often shows 11.1 to
# 11.4 of 16 GB/s on PCIe 3 (T4, V100); newer links reach more.
_PCIE_SHARE = 0.7
_MEMORY_BYTES_PER_SECOND = 5e9  # one thread within host memory (`engine.host_copy`), for offloaded state


@dataclass(frozen=True)
class State:
    """Bytes on one GPU apart from activations."""

    weights: int  # kept here for the forward pass
    optimizer: int  # master weights, moments and the moving average of the weights
    gradients: int  # peak in the backward pass
    early_gradients: int  # the part that exists when activations peak
    step: int  # gradients and their copies while averaging or stepping
    buckets: int = 0  # buffers for averaging during the backward pass
    gathered: int = 0  # other GPUs' weights in the passes (ZeRO 3), or weights cast by autocast
    host: int = 0  # in host memory (`engine.offload`)

    @property
    def resting_bytes(self) -> int:
        """Between steps, without gradients and buckets."""
        return self.weights + self.optimizer

    @property
    def passing_bytes(self) -> int:
        """Temporary, on top of weights, optimizer state and gradients."""
        return max(self.buckets + self.gathered, self.step - self.gradients)

    def backward_peak_bytes(self, activation_bytes: int) -> int:
        """Peak of the passes: gradients appear as activations are freed, unless earlier micro-batches left them."""
        passes = max(self.early_gradients + activation_bytes, self.gradients)
        return self.resting_bytes + self.buckets + self.gathered + passes

    def peak_bytes(self, activation_bytes: int) -> int:
        return max(self.backward_peak_bytes(activation_bytes), self.resting_bytes + self.step)

    def largest_micro_batch(self, usable_bytes: int, *, image_bytes: int) -> int:
        """Most images per forward pass with a peak within `usable_bytes`; 0: none fits."""
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
    """Count the state under any ZeRO stage."""
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
    elif takes_flat_step(engine):
        summed = MASTER_BYTES * share if accumulates and zero_stage == 2 else 0
        left = whole if accumulates and zero_stage == 1 else summed  # by earlier micro-batches
        step = (summed or step - sharded) + OPTIMIZERS[optimizer.name].joined_bytes * share
        if not overlaps(engine, world_size=plan.world_size):
            return State(whole, masters_and_moments, whole + summed, left, step=max(2 * whole + summed, step))
        gradients = left + sharded
        return State(whole, masters_and_moments, gradients, gradients, step, 2 * min(bucket, whole))
    else:
        gradients, early = sharded, 0
        if accumulates:
            gradients, early = (whole, whole) if zero_stage == 1 else (2 * sharded, sharded)
        buckets = bucket * (3 if settings["overlap_comm"] else 2)
        held = State(whole, masters_and_moments, gradients, early, step, buckets)
    return _offloaded(held, engine=engine, share=share)


def _offloaded(held: State, *, engine: EngineConfig, share: int) -> State:
    """Count what stays on the GPU; the CPU optimizer takes float32 gradients, and ZeRO 3 keeps them on the host."""
    if engine.offload == "none":
        return held
    host = held.optimizer + (WEIGHT_BYTES[engine.precision] + MASTER_BYTES) * share
    if engine.zero_stage < 3:
        return replace(held, optimizer=0, step=held.gradients, host=host)
    left = replace(held, optimizer=0, gradients=0, early_gradients=0, step=held.buckets, host=host)
    if engine.offload == "optimizer_and_parameters":
        left = replace(left, weights=0, host=host + held.weights)
    return left


@dataclass(frozen=True)
class Saving:
    """One background save."""

    process_bytes: int  # host memory of rank 0, which copies most; kept between saves
    node_bytes: int | None  # host memory of the first node's processes; None: its GPUs are unknown
    link_bytes_per_second: float | None  # between GPU and host; None: GPU unknown
    copy_seconds: float | None  # of rank 0
    stall_seconds: float | None  # not hidden by one step's passes; None: their time is unknown


def copied_bytes(
    num_parameters: int,
    *,
    engine: EngineConfig,
    optimizer: OptimizerConfig,
    ema: EmaConfig | None,
    zero_stage: ZeroStage,
    processes: int,
) -> tuple[int, int]:
    """Count bytes copied by rank 0 and by each other process."""
    each = MASTER_BYTES + optimizer.bytes_per_parameter + (AVERAGE_BYTES if ema else 0)
    if engine.backend == "accelerate" or zero_stage == 0:
        return round(num_parameters * each), 0
    share = round(-(-num_parameters // processes) * each)
    whole = WEIGHT_BYTES[engine.precision] * num_parameters if zero_stage < 3 else 0
    return whole + share, share


def saving(
    copied: tuple[int, int],
    *,
    engine: EngineConfig,
    gpu: Gpu | None,
    local_processes: int | None,
    pass_seconds: float | None,
) -> Saving | None:
    """Forecast a background save; None: saves block. `copied`: `copied_bytes`; `pass_seconds`: forward and backward."""
    if engine.saving == "blocking":
        return None
    first, other = copied
    link = gpu and _PCIE_SHARE * gpu.host_gb_per_second / 2 * GB
    offloaded = other if engine.offload != "none" else 0  # masters and moments are already on the host
    seconds = max((first - offloaded) / link, offloaded / _MEMORY_BYTES_PER_SECOND) if link else None
    return Saving(
        process_bytes=first,
        node_bytes=None if local_processes is None else first + (local_processes - 1) * other,
        link_bytes_per_second=link,
        copy_seconds=seconds,
        stall_seconds=None if seconds is None or pass_seconds is None else max(0.0, seconds - pass_seconds),
    )

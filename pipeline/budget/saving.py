"""Cost of a background save: host memory for the copy, and how long training may wait for it.

Each process copies its share of masters, moments and averages; rank 0 also the weights of the forward pass under ZeRO 1
and 2, and everything under ZeRO 0 and accelerate. The bytes are checked on real engines with two processes
(tests/pipeline/budget/test_engine_memory.py). The copy runs beside the next step's passes (`engine.host_copy`); any
excess is the stall. Seconds are computed, not measured, without the processes' agreement. A blocking save waits for the
disk, which is not planned.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.budget.gpus import GB, Gpu
from pipeline.budget.memory import ZeroStage
from pipeline.recipe.optimizer import OptimizerConfig
from pipeline.recipe.schema import EngineConfig
from pipeline.recipe.stage import EmaConfig
from pipeline.recipe.vocabulary import AVERAGE_BYTES, MASTER_BYTES, WEIGHT_BYTES

# Of the data sheet's bandwidth in one direction, into page-locked memory: CUDA's bandwidthTest often shows 11.1 to
# 11.4 of 16 GB/s on PCIe 3 (T4, V100); newer links reach more.
_PCIE_SHARE = 0.7
_MEMORY_BYTES_PER_SECOND = 5e9  # one thread within host memory (`engine.host_copy`), for offloaded state


@dataclass(frozen=True)
class Saving:
    """One background save."""

    process_bytes: int  # host memory of rank 0, which copies most; kept from one save to the next
    node_bytes: int | None  # host memory of all processes of the first node; None: the node's GPUs are unknown
    link_bytes_per_second: float | None  # between GPU and host; None: the GPU is unknown
    copy_seconds: float | None  # of rank 0
    stall_seconds: float | None  # the part that the passes of one step do not hide; None: their time is unknown


def copied_bytes(
    num_parameters: int,
    *,
    engine: EngineConfig,
    optimizer: OptimizerConfig,
    ema: EmaConfig | None,
    zero_stage: ZeroStage,
    processes: int,
) -> tuple[int, int]:
    """Count the bytes copied by rank 0, and by each other process."""
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
    offloaded = other if engine.offload != "none" else 0  # masters and moments are on the host already
    seconds = max((first - offloaded) / link, offloaded / _MEMORY_BYTES_PER_SECOND) if link else None
    return Saving(
        process_bytes=first,
        node_bytes=None if local_processes is None else first + (local_processes - 1) * other,
        link_bytes_per_second=link,
        copy_seconds=seconds,
        stall_seconds=None if seconds is None or pass_seconds is None else max(0.0, seconds - pass_seconds),
    )

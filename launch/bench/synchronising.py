"""DeepSpeed's keys that make the host wait for the GPU in each step, or for each gradient. Pure.

A count of operations on a CPU does not see these waits: DeepSpeed asks its accelerator first whether it must wait.
Read in the sources of DeepSpeed 0.19; the defaults are its own.
"""

from __future__ import annotations

from typing import Any


def synchronising_keys(config: dict[str, Any], *, processes: int) -> list[str]:
    """Those of a configuration, with what they wait for."""
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    found: list[str] = []
    if config.get("timers", {}).get("throughput", {}).get("enabled", True):
        found.append("timers.throughput: synchronize() at forward and step")
    if config.get("wall_clock_breakdown", False):
        found.append("wall_clock_breakdown: synchronize() around each phase")
    if config.get("memory_breakdown", False):
        found.append("memory_breakdown: reads of the allocator, printed")
    if config.get("bf16", {}).get("enabled", False) and stage in (1, 2):
        if config["bf16"].get("check_grad_overflow", True):
            found.append("bf16.check_grad_overflow: each gradient is looked at, then a scalar is read")
        if zero.get("compute_grad_norm", True):
            found.append("zero_optimization.compute_grad_norm: the norm is read on the host, in each group")
    if zero.get("overlap_comm", stage == 3) and stage in (1, 2) and processes == 1:
        found.append("zero_optimization.overlap_comm: synchronize() after backward, with nothing to overlap")
    return found

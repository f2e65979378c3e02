"""Measure speed, FLOPs, memory and cost of training on rank 0, for points of the curve.

A step's time is host time between step ends, less evaluation and saving. The loop reads a step's numbers when it queues
the next: a step slow on the GPU shows one step late, and a window's sum is the GPU's. Costs a clock read a step.
"""

import resource
import sys
import time
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch

from shardvit.pipeline.budget.cost import phase_costs
from shardvit.pipeline.budget.gpus import gpu_of_driver
from shardvit.pipeline.ranks.process import CoreWaits
from shardvit.pipeline.recipe.schema import EngineConfig, Recipe
from shardvit.pipeline.recipe.stage_plan import StagePlan
from shardvit.pipeline.recipe.vocabulary import StageName

_GIB = 2**30


@dataclass(frozen=True)
class ImageWork:
    """Training FLOPs of one image, forward and backward, without recomputation: `flops[k]` in phase k of the stage,
    which begins after `starts[k]` steps; the first of them is 0."""

    starts: tuple[int, ...]
    flops: tuple[int, ...]

    def of_image(self, step: int) -> int:
        """FLOPs in step `step`, from 1."""
        return self.flops[bisect_left(self.starts, step) - 1]

    def mean(self, first: int, last: int) -> float:
        """Mean FLOPs in these steps, both included."""
        return sum(map(self.of_image, range(first, last + 1))) / (last + 1 - first)


def stage_work(
    recipe: Recipe, *, stage: StageName, plan: StagePlan, num_classes: int, teacher_flops: int = 0
) -> ImageWork:
    """Count a stage's training FLOPs per image; `teacher_flops` of its teacher's forward pass are among them."""
    costs = phase_costs(recipe, stage=stage, plan=plan, num_classes=num_classes)
    return ImageWork(tuple(costs), tuple(cost.training_flops + teacher_flops for cost in costs.values()))


def peak_flops(engine: EngineConfig, *, gpu_name: str | None) -> float | None:
    """Data-sheet peak FLOP/s of this process's GPU in the recipe's precision; None if unknown, as for TF32."""
    gpu = None if gpu_name is None else gpu_of_driver(gpu_name)
    if gpu is None or (engine.precision == "fp32" and engine.fp32_matmul == "tf32"):
        return None
    return gpu.peak_flops(engine.precision)


class Gauges:
    """Gauges for points of the curve. `peak`: FLOP/s of one process's GPU, None if unknown or a CPU; `process_seconds`:
    of earlier attempts, summed over processes."""

    def __init__(
        self, work: ImageWork, *, processes: int, peak: float | None, on_gpu: bool, process_seconds: float = 0.0
    ) -> None:
        self._work, self._processes, self._peak, self._on_gpu = work, processes, peak, on_gpu
        self._earlier_seconds = process_seconds
        self._start = self._step_ended = time.perf_counter()
        self._aside = 0.0
        self._step_seconds: list[float] = []
        self._waits = CoreWaits()

    @property
    def process_seconds(self) -> float:
        """Seconds of all attempts, summed over their processes."""
        return self._earlier_seconds + (time.perf_counter() - self._start) * self._processes

    def step_done(self, *, aside_seconds: float) -> None:
        """Time the step that ended. `aside_seconds`: spent on evaluations and checkpoints, in this attempt so far."""
        now = time.perf_counter()
        self._step_seconds.append(max(0.0, now - self._step_ended - (aside_seconds - self._aside)))
        self._step_ended, self._aside = now, aside_seconds

    def read(self, *, step: int, images_per_second: float) -> dict[str, float]:
        """Return the metrics of the window ending after `step`, and start the next."""
        work = self._work.mean(step - max(0, len(self._step_seconds) - 1), step)  # of the window's steps
        rate = images_per_second / self._processes * work
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        values = {"perf/model_tflops_per_s": rate / 1e12, "perf/host_memory_peak_gib": peak_bytes / _GIB}
        if self._peak:
            values["perf/mfu"] = rate / self._peak
        if self._on_gpu:
            values["perf/gpu_memory_peak_gib"] = torch.cuda.max_memory_allocated() / _GIB
            values["perf/gpu_hours"] = self.process_seconds / 3600
        else:
            values["perf/process_hours"] = self.process_seconds / 3600
            values["perf/core_wait_frac"] = self._waits.share()
        if self._step_seconds:
            marks = np.percentile(self._step_seconds, (50, 95, 100), method="inverted_cdf").tolist()  # nearest rank
            values |= zip(
                ("perf/step_seconds_p50", "perf/step_seconds_p95", "perf/step_seconds_max"), marks, strict=True
            )
            self._step_seconds.clear()
        return values

"""Measures a contender of `launch.bench.gpu` from within its own loop: it is told where each step begins and ends.

By the number of the step: losses of steps 1 and 10 (the only reads of a scalar), warm-up, three blocks that are timed
as wholes, single steps with their phases and the host's part, and steps under torch's profiler. On a GPU times are
events in the stream; blocks are bounded by synchronisations.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launch.bench.gpu_profile import Split, split_of

PARITY_STEPS = (1, 10)
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Course:
    """Number of steps of each kind."""

    warm_up: int = 10
    blocks: int = 3
    block: int = 20
    singles: int = 5
    profiled: int = 3

    @property
    def steps(self) -> int:
        return self.warm_up + self.blocks * self.block + self.singles + self.profiled


@dataclass(frozen=True)
class Measured:
    """Measurements of the meter; bytes are None on a CPU."""

    block_ms: list[float]  # of a step, in each block
    losses: dict[int, float]  # by step
    first_step_seconds: float  # compiling included
    phase_ms: dict[str, float]  # median of the single steps
    host_ms: float  # until a step is launched onto an empty queue; the least
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    split: Split | None  # None: nothing was profiled

    @property
    def step_ms(self) -> float:
        return statistics.median(self.block_ms)


class Meter:
    """Call `begin`, `phase_done` after forward and backward, and `end` with the loss, for each of `course.steps`."""

    def __init__(self, course: Course, *, device: torch.device) -> None:
        assert course.warm_up >= PARITY_STEPS[-1], "the losses are read while warming up"
        self.course, self._device = course, device
        self._step, self._began, self._marks = 0, 0.0, list[Any]()
        self._block_start: Any = None
        self._block_ms: list[float] = []
        self._losses: dict[int, float] = {}
        self._first_step_seconds = 0.0
        self._phases: list[list[float]] = []
        self._host_ms: list[float] = []
        self._peaks: tuple[int, int] | None = None
        self._profiler: Any = None
        self._split: Split | None = None

    def begin(self) -> None:
        course = self.course
        if self._step == course.steps - course.profiled and course.profiled:
            self._profiler = torch.profiler.profile(activities=self._activities())
            self._profiler.__enter__()
        if self._is_single:
            self._synchronise()
        self._began = time.perf_counter()
        self._marks = [self._now()] if self._is_single else []

    def phase_done(self) -> None:
        if self._is_single:
            self._marks.append(self._now())

    def end(self, loss: Tensor) -> None:
        """After the optimizer's step; nothing waits for it unless it is due."""
        course, single = self.course, self._is_single
        launched = time.perf_counter()
        self._step += 1
        if self._step in PARITY_STEPS:
            self._losses[self._step] = float(loss.detach())
        if self._step == 1:
            self._synchronise()
            self._first_step_seconds = time.perf_counter() - self._began
        if single:
            self._host_ms.append(1000 * (launched - self._began))
            self._marks.append(self._now())
            self._synchronise()
            self._phases.append([self._ms(*pair) for pair in zip(self._marks, self._marks[1:], strict=False)])
        timed = self._step - course.warm_up
        if 0 <= timed <= course.blocks * course.block and timed % course.block == 0:
            self._end_block(first=timed == 0, last=timed == course.blocks * course.block)
        if self._step == course.steps and self._profiler is not None:
            self._synchronise()
            self._profiler.__exit__(None, None, None)
            self._split = split_of(self._profiler, steps=course.profiled)

    def result(self) -> Measured:
        """After the last step."""
        assert self._step == self.course.steps, f"{self._step} of {self.course.steps} steps"
        names = PHASES if self._phases and len(self._phases[0]) == len(PHASES) else ("whole",)
        allocated, reserved = self._peaks or (None, None)
        return Measured(
            block_ms=self._block_ms,
            losses=self._losses,
            first_step_seconds=self._first_step_seconds,
            phase_ms={name: statistics.median(row[i] for row in self._phases) for i, name in enumerate(names)},
            host_ms=min(self._host_ms),
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
            split=self._split,
        )

    @property
    def _is_single(self) -> bool:
        first = self.course.warm_up + self.course.blocks * self.course.block
        return first <= self._step < first + self.course.singles

    def _end_block(self, *, first: bool, last: bool) -> None:
        now = self._now()
        self._synchronise()
        if first:
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._block_ms.append(self._ms(self._block_start, now) / self.course.block)
        if last and self._device.type == "cuda":
            self._peaks = torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)
        self._block_start = self._now()

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, start: Any, end: Any) -> float:
        """Both have passed: the device is synchronised."""
        return 1000 * (end - start) if self._device.type != "cuda" else start.elapsed_time(end)

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _activities(self) -> list[torch.profiler.ProfilerActivity]:
        kinds = torch.profiler.ProfilerActivity
        return [kinds.CPU, kinds.CUDA] if self._device.type == "cuda" else [kinds.CPU]

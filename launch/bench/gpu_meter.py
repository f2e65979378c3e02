"""Measure a contender of `launch.bench.gpu` from within its own loop, which calls a `Meter` in each step.

In step order: losses of steps 1 and 10 (the only scalar reads), warm-up, blocks timed as a whole between
synchronisations, single steps with phases and host time, and steps under torch's profiler, split by kind of kernel.
Kinds come from kernel names of NVIDIA's libraries, torch and Triton; anything unmatched is elementwise, including norms
and reductions. On a CPU the operators' self times stand in for kernels.
"""

import math
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

SO_FAR = "so far"  # the mark of what a process has measured before its end
PARITY_STEPS = (1, 10)
PHASES = ("forward", "backward", "optimizer")

Kind = Literal["attention", "gemm", "optimizer", "copy", "communication", "elementwise"]
_KINDS: tuple[tuple[Kind, str], ...] = (  # the first match wins
    ("communication", r"nccl|all_?reduce|all_?gather|reduce_?scatter|c10d::|gloo:"),
    ("attention", r"flash|fmha|sdpa|scaled_dot_product|_attention|attention_"),
    ("optimizer", r"adam|multi_tensor_apply|_foreach_|lpnorm"),
    ("gemm", r"gemm|nvjet|cutlass|cublas|splitk|triton_tem|triton_mm|::(add)?b?mm$|addmm|matmul|::linear|_linear_"),
    ("copy", r"memcpy|memset|copy|catarray|::cat$|::clone$|::fill_$|::zero_$"),
)
_NO_WORK = re.compile(r"ProfilerStep|^nccl:|^## |Torch-Compiled Region|CompiledFunction|^autograd::|Backward\d*$")


@dataclass(frozen=True)
class Course:
    """Number of steps of each kind."""

    warm_up: int = 10
    blocks: int = 3
    block: int = 10
    singles: int = 5
    profiled: int = 3

    @property
    def first_single(self) -> int:
        return self.warm_up + self.blocks * self.block

    @property
    def steps(self) -> int:
        return self.first_single + self.singles + self.profiled


@dataclass(frozen=True)
class Split:
    """Average breakdown of a step's time."""

    shares: dict[str, float]  # of elapsed time, by kind of kernel and "idle"
    kernels: float  # launched per step
    busy_ms: float
    attention_kernel: str | None  # the one that takes most of attention's time


@dataclass
class Measured:
    """Measurements of one contender; bytes are None on a CPU."""

    block_ms: list[float] = field(default_factory=list)  # per step, in each block
    losses: dict[int, float] = field(default_factory=dict)  # by step
    first_step_seconds: float = 0.0  # with compilation
    phase_ms: dict[str, float] = field(default_factory=dict)  # median over the single steps
    host_ms: float | None = None  # minimum time to launch a step onto an empty queue
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    split: Split | None = None  # None: not profiled


class Meter:
    """In each of `course.steps`, call `begin`, `phase_done` after forward and backward, and `end` with the loss. After
    each block `tell` gets what has been measured so far."""

    def __init__(
        self, course: Course, *, device: torch.device, tell: Callable[[Measured], object] = lambda so_far: None
    ) -> None:
        assert course.warm_up >= PARITY_STEPS[-1], "the losses are read while warming up"
        self.course, self._device, self._on_gpu, self._tell = course, device, device.type == "cuda", tell
        self._measured, self._phases = Measured(), list[list[float]]()
        self._step, self._began, self._marks = 0, 0.0, list[Any]()
        self._block_start: Any = None
        self._profiler: Any = None

    def begin(self) -> None:
        course = self.course
        if course.profiled and self._step == course.steps - course.profiled:
            kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if self._on_gpu else [ProfilerActivity.CPU]
            self._profiler = torch.profiler.profile(activities=kinds)
            self._profiler.__enter__()
        if self._is_single:
            self._synchronise()
        self._began = time.perf_counter()
        self._marks = [self._now()] if self._is_single else []

    def phase_done(self) -> None:
        if self._is_single:
            self._marks.append(self._now())

    def end(self, loss: Tensor) -> None:
        """Call after the optimizer's step; waits for the device only when a number is due."""
        course, single, found = self.course, self._is_single, self._measured
        launched = time.perf_counter()
        self._step += 1
        if self._step in PARITY_STEPS:
            found.losses[self._step] = float(loss.detach())
        if self._step == 1:
            self._synchronise()
            found.first_step_seconds = time.perf_counter() - self._began
        if single:
            found.host_ms = min(found.host_ms or math.inf, 1000 * (launched - self._began))
            self._marks.append(self._now())
            self._synchronise()
            self._phases.append([self._ms(*pair) for pair in zip(self._marks, self._marks[1:], strict=False)])
        timed = self._step - course.warm_up
        if 0 <= timed <= course.blocks * course.block and timed % course.block == 0:
            self._end_block(first=timed == 0, last=timed == course.blocks * course.block)
        if self._step == course.steps and self._profiler is not None:
            self._synchronise()
            self._profiler.__exit__(None, None, None)
            found.split = split_of(self._profiler.events(), steps=course.profiled)

    def result(self) -> Measured:
        assert self._step == self.course.steps, f"{self._step} of {self.course.steps} steps"
        columns = list(zip(*self._phases, strict=True))
        names = PHASES if len(columns) == len(PHASES) else ("whole",)
        self._measured.phase_ms = dict(zip(names, map(statistics.median, columns), strict=False))
        return self._measured

    @property
    def _is_single(self) -> bool:
        return self.course.first_single <= self._step < self.course.first_single + self.course.singles

    def _end_block(self, *, first: bool, last: bool) -> None:
        now, found = self._now(), self._measured
        self._synchronise()
        if not first:
            found.block_ms.append(self._ms(self._block_start, now) / self.course.block)
        elif self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        if last and self._on_gpu:
            found.peak_allocated_bytes = torch.cuda.max_memory_allocated(self._device)
            found.peak_reserved_bytes = torch.cuda.max_memory_reserved(self._device)
        if not first:
            self._tell(found)
        self._block_start = self._now()

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two moments; the device must have passed both."""
        return start.elapsed_time(end) if self._on_gpu else 1000 * (end - start)

    def _synchronise(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)


@dataclass(frozen=True)
class Ran:
    """One execution of a kernel, in microseconds."""

    name: str
    start: float
    end: float


def kind_of(name: str) -> Kind:
    """Classify a kernel by its name."""
    for kind, pattern in _KINDS:
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return "elementwise"


def split_of(events: Iterable[Any], *, steps: int) -> Split:
    """Split a profile's events by kind; ignores annotations, which span kernels."""
    work = [each for each in events if not (getattr(each, "is_user_annotation", False) or _NO_WORK.search(each.name))]
    kernels = [
        Ran(each.name, each.time_range.start, each.time_range.end) for each in work if each.device_type.name == "CUDA"
    ]
    if kernels:
        return split_kernels(kernels, steps=steps)
    spent = [(each.name, each.self_cpu_time_total) for each in work]
    busy = sum(each for _, each in spent)
    return _split(spent, busy=busy, elapsed=busy, steps=steps)


def split_kernels(kernels: Iterable[Ran], *, steps: int) -> Split:
    """Split the busy time by kind, in proportion to the kernels' durations, since kernels may overlap."""
    ran = sorted(kernels, key=lambda each: each.start)
    busy, reached = 0.0, ran[0].start
    for each in ran:
        busy += max(0.0, each.end - max(reached, each.start))
        reached = max(reached, each.end)
    spent = [(each.name, each.end - each.start) for each in ran]
    split = _split(spent, busy=busy, elapsed=reached - ran[0].start, steps=steps)
    split.shares["idle"] = 1 - busy / (reached - ran[0].start)
    return split


def _split(spent: Sequence[tuple[str, float]], *, busy: float, elapsed: float, steps: int) -> Split:
    kinds: dict[str, float] = defaultdict(float)
    attention: dict[str, float] = defaultdict(float)
    for name, each in spent:
        kinds[kind_of(name)] += each
        if kind_of(name) == "attention":
            attention[name] += each
    total = sum(kinds.values()) or 1.0
    return Split(
        {kind: each / total * busy / (elapsed or 1.0) for kind, each in kinds.items()},
        kernels=len(spent) / steps,
        busy_ms=busy / steps / 1000,
        attention_kernel=max(attention, key=attention.__getitem__) if attention else None,
    )

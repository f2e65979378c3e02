"""Split a step's device time by torch's profiler: kernels by kind, idle time, the attention kernel.

Kinds are found by kernels' names, as NVIDIA's libraries, torch and Triton give them; what matches nothing is
elementwise, which holds norms and reductions too. On a CPU the operators' own times stand for kernels.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["attention", "gemm", "optimizer", "copy", "communication", "elementwise"]

_KINDS: tuple[tuple[Kind, str], ...] = (  # in the order in which a name is looked up
    ("communication", r"nccl|all_?reduce|all_?gather|reduce_?scatter|c10d::|gloo:"),
    ("attention", r"flash|fmha|sdpa|scaled_dot_product|_attention|attention_"),
    ("optimizer", r"adam|multi_tensor_apply|_foreach_|lpnorm"),
    ("gemm", r"gemm|nvjet|cutlass|cublas|splitk|triton_tem|triton_mm|::(add)?b?mm$|addmm|matmul|::linear|_linear_"),
    ("copy", r"memcpy|memset|copy|catarray|::cat$|::clone$|::fill_$|::zero_$"),
)
_NO_WORK = re.compile(r"ProfilerStep|^nccl:|^## |Torch-Compiled Region|CompiledFunction|^autograd::|Backward\d*$")


@dataclass(frozen=True)
class Split:
    """Split of one step, on average."""

    shares: dict[str, float]  # of the elapsed time, by kind of kernel and "idle"
    kernels: float  # that were launched
    busy_ms: float
    attention_kernel: str | None  # the one that takes most of attention's time


@dataclass(frozen=True)
class Ran:
    """A kernel that ran, in microseconds."""

    name: str
    start: float
    end: float


def kind_of(name: str) -> Kind:
    """Classify a kernel by its name."""
    for kind, pattern in _KINDS:
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return "elementwise"


def split_of(profile: Any, *, steps: int) -> Split:
    """Split a `torch.profiler.profile` that has ended."""
    events = profile.events()
    kernels = [_ran(event) for event in events if event.device_type.name == "CUDA" and not _is_mark(event)]
    if not kernels:
        return _of_operators(events, steps=steps)
    return split_kernels(kernels, steps=steps)


def split_kernels(kernels: Iterable[Ran], *, steps: int) -> Split:
    """Time of kernels that overlap is shared out as if they ran one after another."""
    ran = sorted(kernels, key=lambda each: each.start)
    by_kind: dict[str, float] = defaultdict(float)
    attention: dict[str, float] = defaultdict(float)
    busy, reached = 0.0, ran[0].start
    for each in ran:
        kind = kind_of(each.name)
        by_kind[kind] += each.end - each.start
        if kind == "attention":
            attention[each.name] += each.end - each.start
        busy += max(0.0, each.end - max(reached, each.start))
        reached = max(reached, each.end)
    elapsed, total = reached - ran[0].start, sum(by_kind.values())
    shares = {kind: spent / total * busy / elapsed for kind, spent in by_kind.items()}
    return Split(
        shares | {"idle": 1 - busy / elapsed},
        kernels=len(ran) / steps,
        busy_ms=busy / steps / 1000,
        attention_kernel=max(attention, key=attention.__getitem__) if attention else None,
    )


def _of_operators(events: Any, *, steps: int) -> Split:
    own = [(event.name, event.self_cpu_time_total) for event in events if not _is_mark(event)]
    by_kind: dict[str, float] = defaultdict(float)
    attention: dict[str, float] = defaultdict(float)
    for name, spent in own:
        by_kind[kind_of(name)] += spent
        if kind_of(name) == "attention":
            attention[name] += spent
    total = sum(by_kind.values()) or 1.0
    return Split(
        {kind: spent / total for kind, spent in by_kind.items()},
        kernels=len(own) / steps,
        busy_ms=total / steps / 1000,
        attention_kernel=max(attention, key=attention.__getitem__) if attention else None,
    )


def _ran(event: Any) -> Ran:
    return Ran(event.name, event.time_range.start, event.time_range.end)


def _is_mark(event: Any) -> bool:
    """An annotation, which covers kernels and is none."""
    return getattr(event, "is_user_annotation", False) or _NO_WORK.search(event.name) is not None

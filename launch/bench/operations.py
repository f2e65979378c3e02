"""Count the operations, device waits, allocated bytes and collectives of training code.

A dispatch mode sees each operation below autograd, on any device; it slows a step down severalfold, and compiled code
runs eagerly. On a CPU nothing waits for a device, so waits are recognised by kind: scalar reads, value-dependent
shapes, blocking copies between devices (`meta` can stand for a GPU), tensors made from Python values (on a GPU a copy
from pageable memory), and calls of `synchronize`. Does not see a kernel's own allocations, waits within collectives or
on streams, or DeepSpeed's, which depend on its accelerator: `synchronising_keys` knows those.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_COLLECTIVES = ("c10d", "_c10d_functional", "symm_mem")
_NO_TRAFFIC = ("wait_tensor", "barrier", "monitored_barrier_")
_READS = ("_local_scalar_dense", "equal", "is_nonzero", "item")
_SHAPES_BY_VALUE = ("nonzero", "masked_select", "unique", "_unique2", "unique_dim", "unique_consecutive", "bincount")
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")


@dataclass(frozen=True)
class Collective:
    """One call of a collective."""

    name: str  # such as allreduce
    num_bytes: int  # of the whole reduced or gathered tensor

    def sent_bytes(self, ranks: int) -> float:
        """Bytes that each rank of a ring sends."""
        if ranks == 1:
            return 0.0
        return self.num_bytes * (ranks - 1) / ranks * (2 if self.name.startswith("allreduce") else 1)


class Operations(TorchDispatchMode):
    """Count while entered; entering again adds to the counts."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()  # such as "aten::add_"; without views, which touch no data
        self.waits: Counter[str] = Counter()  # times the host would wait for a GPU, by reason
        self.collectives: list[Collective] = []  # in order
        self.allocated_bytes = 0  # of new tensors

    @property
    def total(self) -> int:
        return sum(self.names.values())

    @property
    def num_waits(self) -> int:
        return sum(self.waits.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        result = func(*args, **kwargs)
        if func.is_view or func.namespace == "profiler":  # no work, or marks of torch's profiler
            if name == "lift_fresh":
                self.waits["a tensor of Python's values"] += 1
            return result
        self.names[f"{func.namespace}::{name}"] += 1
        if func.namespace in _COLLECTIVES:
            if name not in _NO_TRAFFIC:
                self.collectives.append(_collective(name, args))
        else:
            if (reason := _wait(name, args, kwargs, result)) is not None:
                self.waits[reason] += 1
            self.allocated_bytes += _new_bytes(result, (args, kwargs))
        return result

    def __enter__(self) -> Operations:
        self._watching = contextlib.ExitStack()
        self._watching.enter_context(_watched_synchronisations(self.waits))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._watching.close()


def count(action: Callable[[], object]) -> Operations:
    """Count the operations of `action`."""
    with Operations() as counted:
        action()
    return counted


def synchronising_keys(config: dict[str, Any], *, processes: int) -> list[str]:
    """Keys of a DeepSpeed configuration that make the host wait for the GPU in each step or for each gradient, and why.
    Pure; from the sources of DeepSpeed 0.19, with its defaults."""
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


def _collective(name: str, args: Sequence[Any]) -> Collective:
    tensors = [each for each in args if isinstance(each, (Tensor, list, tuple))]
    sizes = [sum(t.numel() * t.element_size() for t in tree_iter(each) if isinstance(t, Tensor)) for each in tensors]
    return Collective(name.strip("_"), max(sizes, default=0))


def _wait(name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> str | None:
    if name in _READS:
        return "a scalar is read"
    by_value = name in _SHAPES_BY_VALUE or (name == "repeat_interleave" and isinstance(args[0], Tensor))
    if by_value or (name in _INDEXED and any(_is_mask(each) for each in args[1] or ())):
        return "a shape depends on values"
    if name in ("_to_copy", "copy_"):
        source, target = (args[1], args[0]) if name == "copy_" else (args[0], result)
        on_device = {source.device.type, target.device.type} != {"cpu"}
        waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        if on_device and source.device != target.device and waits:
            return "a blocking copy"
    return None


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _new_bytes(result: Any, given: Any) -> int:
    made = [each.untyped_storage() for each in tree_iter(result) if isinstance(each, Tensor)]
    if not made:
        return 0
    old = {id(each.untyped_storage()) for each in tree_iter(given) if isinstance(each, Tensor)}
    return sum(each.nbytes() for each in {id(one): one for one in made if id(one) not in old}.values())


@contextlib.contextmanager
def _watched_synchronisations(waits: Counter[str]) -> Iterator[None]:
    """Count `synchronize` calls of torch and DeepSpeed: no-ops on a CPU, but a GPU's queue would drain."""

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def synchronize(*args: Any, **kwargs: Any) -> Any:
            waits["synchronize()"] += 1
            return call(*args, **kwargs)

        return synchronize

    with contextlib.ExitStack() as stack:
        owners: list[Any] = [torch.cuda, torch.accelerator, torch.cpu]
        if "deepspeed" in sys.modules:
            owners.append(sys.modules["deepspeed"].accelerator.get_accelerator())
        for owner in owners:
            stack.enter_context(mock.patch.object(owner, "synchronize", watched(owner.synchronize)))
        yield

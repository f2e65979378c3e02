"""Count the operations, device waits, allocated bytes and collectives of training code.

A dispatch mode sees each operation below autograd, on any device; it slows a step down severalfold, and compiled code
runs eagerly. On a CPU nothing waits for a device, so waits are recognised by kind: scalar reads, value-dependent
shapes, copies between devices that block or come from pageable memory (`meta` can stand for a GPU), tensors made from
Python values (on a GPU such a copy, too), and calls of `synchronize`. DeepSpeed asks its accelerator whether there is
anything to wait for: `as_on_a_gpu` answers as a GPU would. Does not see a kernel's own allocations, or waits within
collectives and on torch's own streams.
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
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

_COLLECTIVES = ("c10d", "_c10d_functional", "symm_mem")
_NO_TRAFFIC = ("wait_tensor", "barrier", "monitored_barrier_")
_READS = ("_local_scalar_dense", "equal", "is_nonzero", "item")
_SHAPES_BY_VALUE = ("nonzero", "masked_select", "unique", "_unique2", "unique_dim", "unique_consecutive", "bincount")
_SYNCHRONOUS = (  # what DeepSpeed's CPU says of itself
    "is_synchronized_device",
    "resolves_data_dependency",
    "handles_memory_backpressure",
    "use_host_timers",
)
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
        self._watching.enter_context(watched_synchronisations(self.waits))
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


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let an engine that DeepSpeed opens and steps here wait wherever it would on a GPU: its accelerator says that the
    device runs behind the host. Streams and events do nothing but count the host's waits for them."""
    accelerator = sys.modules["deepspeed"].accelerator.get_accelerator()

    class Moment:
        """A stream or an event."""

        def __getattr__(self, name: str) -> Callable[..., bool]:
            return lambda *args, **kwargs: True  # wait_stream, wait_event, record, query, ...

        def synchronize(self) -> None:
            accelerator.synchronize()

    plain = type(accelerator)
    streams = {
        name: lambda *args, **kwargs: Moment() for name in ("Stream", "Event", "current_stream", "default_stream")
    }
    accelerator.__class__ = type("AsOnAGpu", (plain,), streams | {name: lambda self: False for name in _SYNCHRONOUS})
    try:
        with mock.patch.object(Tensor, "record_stream", _record_stream):
            yield
    finally:
        accelerator.__class__ = plain


def _collective(name: str, args: Sequence[Any]) -> Collective:
    tensors = [each for each in args if isinstance(each, (Tensor, list, tuple))]
    sizes = [sum(t.numel() * t.element_size() for t in tree_iter(each) if isinstance(t, Tensor)) for each in tensors]
    return Collective(name.strip("_"), max(sizes, default=0))


def _wait(name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> str | None:
    if name in _READS:
        return "a scalar is read"
    repeats = name == "repeat_interleave" and isinstance(args[0], Tensor) and kwargs.get("output_size") is None
    by_value = name in _SHAPES_BY_VALUE or repeats
    if by_value or (name in _INDEXED and any(_is_mask(each) for each in args[1] or ())):
        return "a shape depends on values"
    if name in ("_to_copy", "copy_"):
        source, target = (args[1], args[0]) if name == "copy_" else (args[0], result)
        on_device = {source.device.type, target.device.type} != {"cpu"}
        waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        if on_device and source.device != target.device:
            if waits:
                return "a blocking copy"
            if source.device.type == "cpu" and not _is_page_locked(source):
                return "a copy from pageable memory"
    return None


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _new_bytes(result: Any, given: Any) -> int:
    made = [each.untyped_storage() for each in tree_iter(result) if isinstance(each, Tensor)]
    if not made:
        return 0
    old = {id(each.untyped_storage()) for each in tree_iter(given) if isinstance(each, Tensor)}
    return sum(each.nbytes() for each in {id(one): one for one in made if id(one) not in old}.values())


_PRETENDED = "pretends_to_be_page_locked"  # where no GPU is


def _is_page_locked(source: Tensor) -> bool:
    return hasattr(source.untyped_storage(), _PRETENDED) or (torch.cuda.is_available() and source.is_pinned())


def _record_stream(*_: object) -> None:
    """A function: a mock has no name, by which the compiler knows torch's."""


_FROM_NUMPY = torch.from_numpy


def _from_numpy(array: Any) -> Tensor:
    """Unseen by the mode, to which it looks like a tensor of Python's values; the array stays on the host."""
    with _disable_current_modes():
        return _FROM_NUMPY(array)


def _pin_memory(source: Tensor, *_: object) -> Tensor:
    """`Tensor.pin_memory` without a GPU."""
    copy = source.clone()
    setattr(copy.untyped_storage(), _PRETENDED, True)
    return copy


@contextlib.contextmanager
def watched_synchronisations(waits: Counter[str]) -> Iterator[None]:
    """Count `synchronize` calls of torch and DeepSpeed: no-ops on a CPU, but a GPU's queue would drain."""

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def synchronize(*args: Any, **kwargs: Any) -> Any:
            waits["synchronize()"] += 1
            return call(*args, **kwargs)

        return synchronize

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "from_numpy", _from_numpy))
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(Tensor, "pin_memory", _pin_memory))
        owners: list[Any] = [torch.cuda, torch.accelerator, torch.cpu]
        if "deepspeed" in sys.modules:
            owners.append(sys.modules["deepspeed"].accelerator.get_accelerator())
        for owner in owners:
            stack.enter_context(mock.patch.object(owner, "synchronize", watched(owner.synchronize)))
        yield

"""Keep torch's compiler out of processes that compile nothing: saves 1.4 CPU seconds and 70 MB a rank.

timm and torch's optimizers import it only to exclude methods from compilation; torchvision, which timm imports, uses it
in a detection kernel. Both are deferred until called. A torch version that differs imports the compiler as usual.
timm and accelerate also import what they could log with: seconds, and folders that wandb leaves in a killed process.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch.optim import SGD, Adam, AdamW, Optimizer

_MODULE = "torch._dynamo.utils"


def import_timm() -> None:
    """Import timm without the compiler; call before any other import of timm."""
    if "timm" in sys.modules or "torch._dynamo" in sys.modules:
        return
    stand_in = ModuleType(_MODULE)
    stand_in.__dict__.update(is_compile_supported=_is_compile_supported, __getattr__=_real_attribute)
    sys.modules[_MODULE] = stand_in
    disable_now, torch.compiler.disable = torch.compiler.disable, _disable_when_called
    try:
        with hidden("wandb"):
            importlib.import_module("timm")
    finally:
        torch.compiler.disable = disable_now
        if sys.modules.get(_MODULE) is stand_in:
            del sys.modules[_MODULE]


@contextlib.contextmanager
def hidden(*names: str) -> Iterator[None]:
    """Make libraries that are not imported yet look as if they were not installed."""
    absent: dict[str, Any] = dict.fromkeys({*names} - sys.modules.keys())
    sys.modules.update(absent)
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)


def keep_out_of_optimizers() -> None:
    """Let Adam, AdamW and SGD step without the compiler, and never be compiled; call before creating one."""
    # Methods that mark themselves as not compilable at their first call, importing the compiler, are marked now.
    marked = _decorated_code(torch, "_disable_dynamo")
    for method in vars(Optimizer).values():
        if marked is not None and getattr(method, "__code__", None) is marked:
            method.__wrapped__.__dict__.setdefault("__dynamo_disable", method.__wrapped__)
    # Both ends of a step break the graph. Otherwise that wrapper only turns gradients off (unless `differentiable`).
    breaking = _decorated_code(torch_optimizer, "_use_grad_for_differentiable")
    for optimizer in (Adam, AdamW, SGD):
        for layer in _wrapped_layers(vars(optimizer).get("step")):
            if breaking is not None and layer.__code__ is breaking:
                optimizer.step = torch.no_grad()(layer.__wrapped__)


def _disable_when_called(function: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
    """Replacement for `torch.compiler.disable`."""
    return torch._disable_dynamo(function, recursive)


def _is_compile_supported(*arguments: Any, **more: Any) -> bool:
    return importlib.import_module(_MODULE).is_compile_supported(*arguments, **more)


def _real_attribute(name: str) -> Any:
    if name.startswith("__"):  # Python's import machinery asks
        raise AttributeError(name)
    if getattr(sys.modules.get(_MODULE), "__getattr__", None) is _real_attribute:
        del sys.modules[_MODULE]
    return getattr(importlib.import_module(_MODULE), name)


def _decorated_code(module: Any, decorator: str) -> Any:
    """Return the code object shared by all functions with this decorator, or None."""
    decorate = getattr(module, decorator, None)
    return None if decorate is None else decorate(lambda: None).__code__


def _wrapped_layers(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)

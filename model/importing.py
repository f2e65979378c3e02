"""timm, imported without torch's compiler: 1.3 CPU seconds and 100 MB less in every process.

timm keeps the compiler away from some methods of models that are not ours, which imports it; and imports torchvision,
of which one file takes a function from `torch._dynamo.utils` for a kernel of detection models. While timm is imported,
both wait until they are called. (Any other name is taken from the real module at once.)
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

_MODULE = "torch._dynamo.utils"


def import_timm() -> None:
    """Import timm; call before anything that imports it."""
    if "timm" in sys.modules or "torch._dynamo" in sys.modules:
        return
    stand_in = ModuleType(_MODULE)
    stand_in.__dict__.update(is_compile_supported=_is_compile_supported, __getattr__=_real)
    sys.modules[_MODULE] = stand_in
    disable_now = torch.compiler.disable
    torch.compiler.disable = _disable
    try:
        importlib.import_module("timm")
    finally:
        torch.compiler.disable = disable_now
        if sys.modules.get(_MODULE) is stand_in:
            del sys.modules[_MODULE]


def _disable(function: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
    """`torch.compiler.disable` that imports the compiler when the function is called."""
    return torch._disable_dynamo(function, recursive)


def _is_compile_supported(*arguments: Any, **more: Any) -> bool:
    return importlib.import_module(_MODULE).is_compile_supported(*arguments, **more)


def _real(name: str) -> Any:
    if name.startswith("__"):  # asked for by Python's own import
        raise AttributeError(name)
    if getattr(sys.modules.get(_MODULE), "__getattr__", None) is _real:
        del sys.modules[_MODULE]
    return getattr(importlib.import_module(_MODULE), name)

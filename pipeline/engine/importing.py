"""deepspeed, imported without what it brings and nothing here uses: 3 CPU seconds and 250 MB in every rank.

- mlflow, which its autotuner imports.
- torch's compiler, for functions of its Muon, which ZeRO imports whatever the optimizer: they are compiled if they are
  called.
- A look at which of its kernels could be compiled here, by running the C++ compiler. The only one asked for is its
  shared-memory all-reduce on CPUs, which it would compile for half a minute and which leaves 69 MB in /dev/shm for
  each rank and run: gloo does the same.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch


def import_deepspeed() -> Any:
    """The package, with warnings alone in its log."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    with _without("mlflow"), _compiled_if_called():
        import deepspeed

        with contextlib.suppress(ImportError):  # of another version
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.ops.__dict__["__compatible_ops__"] = {}  # kernel's name -> whether it can be had; made at the first look
    return deepspeed


@contextlib.contextmanager
def _compiled_if_called() -> Iterator[None]:
    """`torch.compile` as a decorator compiles at the first call."""
    compile_now = torch.compile

    def compile_later(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiled = functools.cache(lambda: compile_now(function, **options))
        return functools.wraps(function)(lambda *inputs, **more: compiled()(*inputs, **more))

    torch.compile = compile_later
    try:
        yield
    finally:
        torch.compile = compile_now


@contextlib.contextmanager
def _without(library: str) -> Iterator[None]:
    """Makes the library impossible to import, unless it was already."""
    if library in sys.modules:
        yield
        return
    sys.modules[library] = None  # pyright: ignore[reportArgumentType] # Python's mark of "cannot be imported"
    try:
        yield
    finally:
        del sys.modules[library]

"""torch's optimizers without its compiler, which they import to be left alone by it: 1.3 CPU seconds and 100 MB in
every process that compiles nothing.

They ask two things of it. At both ends of a step a graph is to end: nothing, where no step is compiled. And some
methods get a mark at their first call, not to be compiled: here they get it before. A torch that does this in another
way imports the compiler as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.optim.optimizer as torchs
from torch.optim import SGD, Adam, AdamW, Optimizer

_ADAPTED = (Adam, AdamW, SGD)


def keep_compiler_out() -> None:
    """Of the optimizers of torch, in this process; call before one is made. No optimizer may be compiled then."""
    marking = _code(torch, "_disable_dynamo")
    for method in vars(Optimizer).values():
        if marking is not None and getattr(method, "__code__", None) is marking:
            method.__wrapped__.__dict__.setdefault("__dynamo_disable", method.__wrapped__)
    breaking = _code(torchs, "_use_grad_for_differentiable")
    for optimizer in _ADAPTED:
        for layer in _layers(vars(optimizer).get("step")):
            if breaking is not None and layer.__code__ is breaking:
                # All that this layer does besides: gradients are off, unless the optimizer is `differentiable`.
                optimizer.step = torch.no_grad()(layer.__wrapped__)


def _code(module: Any, decorator: str) -> Any:
    """What all functions share that this decorator has made; None: there is no such decorator."""
    decorate = getattr(module, decorator, None)
    return None if decorate is None else decorate(lambda: None).__code__


def _layers(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)

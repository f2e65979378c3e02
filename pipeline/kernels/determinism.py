"""The same bits each time on the same GPU: which runs need torch's deterministic algorithms, and turning them on.

What a step computes with is deterministic by itself, with two exceptions:
- Attention's backward pass adds up the queries' gradient over tiles of keys in any order. On an H100 cuDNN repeats its
  bits for 197 tokens and not for 257 (`launch/bench/records/gpu_first_runs.txt`), as tiles of 128 would: two addends
  have one order. Other kernels, and cuDNN beyond 256 tokens, need torch's deterministic algorithms, without cuDNN.
- cuDNN may choose convolutions that add in any order (hybrids and ResNets).

Costs nothing up to 256 tokens in half precision on compute capability 9 and 10; else a slower attention.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from data_shards.errors import UserError
from pipeline.kernels.attention import AttentionCase, order_of
from pipeline.recipe.vocabulary import AttentionKernel

_TWO_TILES = 256  # tokens
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS's; torch demands one of two values
_REPEATING_WORKSPACES = (":4096:8", ":16:8")  # the first is torch's own size on compute capability 9


def repeats_bits(cases: Sequence[AttentionCase], *, asked: AttentionKernel | Literal["auto"], convolves: bool) -> bool:
    """True if a model with these attention cases is bit-reproducible without torch's deterministic mode."""
    if convolves:
        return False
    kernels = {order_of(case)[0][0] if asked == "auto" else asked for case in cases}
    return kernels == {"cudnn"} and all(case.tokens <= _TWO_TILES for case in cases)


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Use torch's deterministic algorithms alone. UserError: the environment says otherwise."""
    if os.environ.setdefault(_WORKSPACE, _REPEATING_WORKSPACES[0]) not in _REPEATING_WORKSPACES:
        raise UserError(
            f"{_WORKSPACE} is {os.environ[_WORKSPACE]}, with which matrix products need not repeat their bits: unset "
            f"it, set it to {_REPEATING_WORKSPACES[0]}, or set engine.deterministic: off"
        )
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # else each new tensor is written once more
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]

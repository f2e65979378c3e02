"""Average and judge the flat gradients of ZeRO 1 and 2 in bf16 and float32.

`GradientJudge` finds the norm over all ranks, whether it is finite, and which flags the ranks raise, by one message a
step (none in a single process). Nothing comes to the host: the verdict goes to the optimizer's kernels, the numbers to
`late_metrics`. `reduce_at_once` replaces DeepSpeed's hooks, which copy each gradient twice and all-reduce: one
concatenation and one reduce-scatter after the backward pass, of half the bytes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed
from torch._utils import _flatten_dense_tensors

from pipeline.engine.base import Flags
from pipeline.optimizers.flat import GradientVerdict

_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_'s
_ROW_ELEMENTS = 1 << 16


class GradientJudge:
    """Judges the pieces that the ranks hold of one gradient; `clip_grad_norm` 0: nothing is clipped.

    Attributes:
        flags: of this rank, sent with the next norm.
        numbers: of the last gradient, see `base.StepResult`.
    """

    def __init__(self, *, clip_grad_norm: float) -> None:
        self.flags: Flags = ()
        self.numbers = torch.empty(0)
        self._skipped: Tensor | None = None
        self._clip_grad_norm = clip_grad_norm

    def __call__(self, gradient: Tensor) -> GradientVerdict:
        """`gradient`: this rank's piece, float32 [any]; collective."""
        shared = torch.zeros(1 + len(self.flags), dtype=torch.float64, device=gradient.device)
        shared[0] = _norm(gradient)
        for number, flag in enumerate(self.flags, start=1):
            if flag:
                shared[number].fill_(1.0)  # a copy from the host would wait for the device
        if distributed.get_world_size() > 1:
            shared[0].square_()
            distributed.all_reduce(shared)
            shared[0].sqrt_()
        norm = shared[0].float()
        skip = (norm - norm).ne(0).float()  # 0 for what is finite, nan for all else
        self._skipped = skip.double() if self._skipped is None else self._skipped + skip
        self.numbers = torch.stack([norm, 1 - skip, *shared[1:].float()])
        if not self._clip_grad_norm:
            return GradientVerdict(skip=skip, divisor=None)
        return GradientVerdict(skip=skip, divisor=((norm + _EPS) / self._clip_grad_norm).clamp(min=1.0))

    def take_skipped(self) -> int:
        """Return and reset the count of gradients that were not finite; waits for the device."""
        skipped, self._skipped = self._skipped, None
        return 0 if skipped is None else int(skipped)


def reduce_at_once(optimizer: Any) -> None:
    """Make a ZeRO 1 optimizer of DeepSpeed 0.19, of a single group and without hooks, average its gradients so."""
    (parameters,), (size,) = optimizer.bit16_groups, optimizer.partition_size
    world_size = distributed.get_world_size()
    padding = parameters[0].new_zeros(size * world_size - sum(each.numel() for each in parameters))

    def reduce_gradients(pipeline_parallel: bool = False) -> None:
        mine = flat = _flatten_dense_tensors(
            [*(torch.zeros_like(each) if each.grad is None else each.grad for each in parameters), padding]
        )
        for each in parameters:
            each.grad = None
        if world_size > 1:
            mine = flat.new_empty(size)
            distributed.reduce_scatter_tensor(mine, flat.div_(world_size))
        optimizer.averaged_gradients[0] = SimpleNamespace(flat_partition=mine)  # what it takes of DeepCompile, too

    optimizer.reduce_gradients = reduce_gradients


def _norm(flat: Tensor) -> Tensor:
    """The norm by rows: on a CPU, torch's sum of 10^8 squares at once is wrong by half a percent."""
    rows = flat.numel() // _ROW_ELEMENTS
    body, rest = flat[: rows * _ROW_ELEMENTS].view(rows, _ROW_ELEMENTS), flat[rows * _ROW_ELEMENTS :]
    norms = torch.cat([torch.linalg.vector_norm(body, dim=1), torch.linalg.vector_norm(rest, dim=0, keepdim=True)])
    return torch.linalg.vector_norm(norms.double())

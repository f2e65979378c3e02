"""Average gradients and gather weights of ZeRO 1 and 2 in buckets, while the passes go on, and step in between.

Each bucket (`buckets`) is a parameter group of DeepSpeed's, of which this process keeps one equal piece. When the
backward pass has all gradients of a bucket, they are concatenated and reduce-scattered into this process's flat
gradient; the step copies the new weights of its pieces into the buckets and starts all-gathers, and the next forward
pass waits for each bucket where it first needs it. A GPU does this on NCCL's own stream: waiting orders streams, and
the host never waits. Sends 2 elements a parameter and step; under ZeRO 2, which keeps its sum of micro-batches in
float32 pieces, one more for each further micro-batch. A bucket waits until the one before has arrived, so gradients
take three buckets and a piece. All processes send in one fixed order, whatever the order of their gradients.

Replaces `reduce_gradients`, `step` and `zero_grad` of DeepSpeed 0.19's ZeRO optimizer, which stays in charge of the
pieces and of saving. In a single process nothing is sent.
"""

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch._utils import _flatten_dense_tensors

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.optimizers.flat import FlatOptimizer


class ShardedStep:
    """The collectives and the step of one engine. `during`: when gradients are averaged; `keeps`: what a process keeps
    of the gradients between micro-batches."""

    def __init__(
        self,
        zero: Any,
        optimizer: FlatOptimizer,
        *,
        units: Mapping[str, nn.Module],
        during: Literal["backward", "after"],
        keeps: Literal["whole", "pieces"],
        accumulation_steps: int,
    ) -> None:
        self._ranks, self._optimizer, self._during, self._keeps = distributed.get_world_size(), optimizer, during, keeps
        self._accumulates = keeps == "pieces" and accumulation_steps > 1
        self._masters: list[Tensor] = list(zero.single_partition_of_fp32_groups)
        self._buckets: list[list[Tensor]] = zero.bit16_groups
        self._weights: list[Tensor] = zero.bit16_groups_flat
        rank = distributed.get_rank()
        self._pieces: list[Tensor] = [pieces[rank] for pieces in zero.parallel_partitioned_bit16_groups]
        self._padding = [
            flat.new_zeros(flat.numel() - sum(map(torch.numel, bucket)))
            for flat, bucket in zip(self._weights, self._buckets, strict=True)
        ]
        self._ends = [0, *accumulate(master.numel() for master in self._masters)]
        self._gradient: Tensor | None = None  # this process's flat piece, as sent
        self._sum: Tensor | None = None  # over micro-batches, float32
        self._sends = False  # this backward pass
        self._next = -1  # bucket to send
        self._missing: list[int] = []  # gradients that a bucket waits for
        self._reducing: distributed.Work | None = None
        self._gathering = deque[Any]()  # torch's `Work` by bucket, from the next to wait for
        zero.reduce_gradients, zero.step, zero.zero_grad = _nothing, self._step, _nothing
        zero._update_model_bit16_weights = _nothing  # the parameters' views of its flat weights stay
        self._needed_first = -1
        self._undo: list[Callable[[], object]] = []
        if self._ranks > 1:
            self._watch(units)

    def begin(self, *, last: bool) -> None:
        """Call before a backward pass; `last`: of the step."""
        self._sends = last or self._keeps == "pieces"
        if self._sends:
            self._next, self._missing = len(self._buckets) - 1, [len(bucket) for bucket in self._buckets]

    def end(self) -> None:
        """Call after a backward pass: sends what is left, such as parameters without part in the loss."""
        if not self._sends:
            return
        if any(count < 0 for count in self._missing):
            raise UserError(
                "engine.overlap: a gradient came in two parts in one backward pass, as from reentrant activation "
                "checkpointing: set engine.overlap to off"
            )
        while self._next >= 0:
            self._send()
        self._wait_for_sent()
        self._sends = False
        if self._accumulates:
            assert self._gradient is not None
            self._sum = self._gradient.float() if self._sum is None else self._sum.add_(self._gradient)
            self._gradient = None

    def settle(self, bucket: int | None = None) -> None:
        """Wait for the gathered weights up to a bucket, or all; on a GPU only its stream waits."""
        last = len(self._buckets) - 1 if bucket is None else bucket
        while self._gathering and len(self._buckets) - len(self._gathering) <= last:
            self._gathering.popleft().wait()

    def settle_first(self) -> None:
        """Wait for what a forward pass needs from its start; its units wait for the rest."""
        self.settle(self._needed_first)

    def close(self) -> None:
        """Let go of the model."""
        for undo in self._undo:
            undo()

    def _watch(self, units: Mapping[str, nn.Module]) -> None:
        """Hook the gradients, and the units that a forward pass reaches later than its start."""
        bucket_of = {id(each): number for number, bucket in enumerate(self._buckets) for each in bucket}
        if self._during == "backward":
            for number, bucket in enumerate(self._buckets):
                for each in bucket:
                    self._undo.append(each.register_post_accumulate_grad_hook(partial(self._arrived, number)).remove)
        later = set[int]()
        for module in units.values():
            numbers = [bucket_of[id(each)] for each in module.parameters() if id(each) in bucket_of]
            if numbers:
                self._undo.append(_before_calls(module, partial(self.settle, max(numbers))))
                later |= {id(each) for each in module.parameters()}
        self._needed_first = max((number for each, number in bucket_of.items() if each not in later), default=-1)

    def _arrived(self, number: int, parameter: Tensor) -> None:
        if self._sends:
            self._missing[number] -= 1
            while self._next >= 0 and self._missing[self._next] <= 0:
                self._send()

    def _send(self) -> None:
        number, self._next = self._next, self._next - 1
        bucket = self._buckets[number]
        flat = _flatten_dense_tensors(
            [*(torch.zeros_like(each) if each.grad is None else each.grad for each in bucket), self._padding[number]]
        )
        for each in bucket:
            each.grad = None
        if self._ranks == 1 and len(self._buckets) == 1:
            self._gradient = flat
            return
        gradient = flat.new_empty(self._ends[-1]) if self._gradient is None else self._gradient
        mine, self._gradient = gradient[self._ends[number] : self._ends[number + 1]], gradient
        if self._ranks == 1:
            mine.copy_(flat)
            return
        self._wait_for_sent()
        self._reducing = distributed.reduce_scatter_tensor(mine, flat, async_op=True)

    def _wait_for_sent(self) -> None:
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None

    @torch.no_grad()
    def _step(self) -> None:
        gradient = self._gradient if self._sum is None else self._sum
        assert gradient is not None, "step() before a backward pass"
        self._gradient = self._sum = None
        gradient = gradient.float()
        if self._ranks > 1:
            gradient.div_(self._ranks)
        self._optimizer.step_by(gradient)
        del gradient
        torch._foreach_copy_(self._pieces, self._masters)
        if self._ranks > 1:
            self._gathering.extend(
                distributed.all_gather_into_tensor(flat, piece, async_op=True)
                for flat, piece in zip(self._weights, self._pieces, strict=True)
            )


def _before_calls(module: nn.Module, action: Callable[[], None]) -> Callable[[], object]:
    """Run `action` before each call of `module`, also a compiled one, outside of its graph; returns how to stop."""
    compiled: Any = module._compiled_call_impl
    if compiled is None:
        return module.register_forward_pre_hook(lambda _, inputs: action()).remove

    def called(*inputs: Any, **more: Any) -> Any:
        action()
        return compiled(*inputs, **more)

    module._compiled_call_impl = called
    return partial(setattr, module, "_compiled_call_impl", compiled)


def _nothing(*arguments: Any, **more: Any) -> None:
    pass

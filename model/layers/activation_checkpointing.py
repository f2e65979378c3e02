"""Activation checkpointing: every k-th block keeps only its input, and is computed again in the backward pass.

Blocks are the Transformer's, after the units of a hybrid's stem; or the units of a ResNet. The first is recomputed and
from there every k-th, so that with k > 1 the last one mostly is not: its activations are needed at once. Costs the
marked blocks' forward pass once more (k = 1: a third more arithmetic) and changes no gradient. Names, weights and the
blocks' own forward passes stay; a block that is compiled in place is recomputed by its compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class CheckpointedBlocks(nn.Sequential):
    """Blocks one after the other, some of which are recomputed; what a Sequential becomes, in place."""

    recomputed: frozenset[int]  # their numbers

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        for block in in_turn(self):
            x = block(x)
        return x


def checkpoint_blocks(model: nn.Module, *, every: int) -> None:
    """Recompute every `every`-th block in the backward pass from now on; 0: none."""
    number = 0
    for name, blocks in model.named_modules():
        if name.split(".")[-1] == "blocks":
            assert isinstance(blocks, nn.Sequential)
            blocks.__class__ = CheckpointedBlocks if every else nn.Sequential
            if isinstance(blocks, CheckpointedBlocks):
                blocks.recomputed = frozenset(own for own in range(len(blocks)) if (number + own) % every == 0)
            number += len(blocks)


def in_turn(blocks: nn.Sequential) -> Iterator[Callable[[Tensor], Tensor]]:
    """The blocks, each as it is to be called."""
    recomputed = blocks.recomputed if isinstance(blocks, CheckpointedBlocks) else ()
    for number, block in enumerate(blocks):
        yield partial(checkpoint, block, use_reentrant=False) if number in recomputed else block

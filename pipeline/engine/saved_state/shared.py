"""Open a saved state on many ranks: rank 0 reads what all need and sends it, each rank reads its own shard.

So a state is read from the disk once a run, not once a rank. Where an engine keeps everything whole, all of it comes
from rank 0, in pieces of 64 MiB over the ranks' host group; a piece takes three times its bytes of memory on its way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from data_shards.errors import UserError
from pipeline.engine.saved_state.portable import PortableState, StateShards, open_state
from pipeline.engine.saved_state.state_files import left_out, put_back
from pipeline.ranks.group import Ranks

_PIECE_ELEMENTS = 16 << 20


@dataclass(frozen=True)
class SharedState(PortableState):
    """A state whose tensors come from rank 0: where they do, `part` is collective and all ranks ask for the same."""

    _ranks: Ranks = field(kw_only=True, repr=False)
    _own: PortableState | None = field(kw_only=True, repr=False)  # on rank 0
    _all: bool = field(kw_only=True)  # not only the frozen weights

    def part(self, name: str, *, of: str, first: int, count: int) -> Tensor:
        if not self._all and name not in self.frozen:
            return super().part(name, of=of, first=first, count=count)
        whole = None if self._own is None else self._own.part(name, of=of, first=first, count=count)
        return told(whole, count, ranks=self._ranks)


def open_shared(
    folder: Path,
    *,
    backend: str,
    zero_stage: int,
    processes: int,
    model: nn.Module,
    ranks: Ranks,
    keeps: Literal["whole", "shard"],
    takes: Literal["pieces", "parameters"] = "pieces",
) -> PortableState:
    """`open_state`, collective. All ranks get `optimizer` only where it `takes` parameters."""

    def opened() -> PortableState:
        return open_state(folder, backend=backend, zero_stage=zero_stage, processes=processes, model=model)

    one_file = backend == "accelerate" or zero_stage == 0
    if ranks.place.world_size == 1 or (keeps == "shard" and one_file):  # mapped: a rank reads its share of it
        return opened()
    own, known, problem = None, None, ""
    if ranks.place.is_main:
        try:
            own = opened()
            known = replace(
                own,
                buffers={name: buffer.clone() for name, buffer in own.buffers.items()},
                frozen={name: torch.empty(0) for name in own.frozen},
                optimizer=None,
                _flat=own._flat if isinstance(own._flat, StateShards) else _nothing,
            )
        except UserError as error:
            problem = str(error)
    known, problem = ranks.from_main((known, problem))
    if problem:
        raise UserError(problem)
    assert known is not None
    optimizer = None
    if takes == "parameters":
        optimizer = _told_structure(own.optimizer if own else None, ranks=ranks)
    fields: dict[str, Any] = {each.name: getattr(known, each.name) for each in dataclasses.fields(PortableState)}
    fields["optimizer"] = optimizer
    return SharedState(**fields, _ranks=ranks, _own=own, _all=keeps == "whole")


def told(tensor: Tensor | None, count: int, *, ranks: Ranks) -> Tensor:
    """Rank 0's 1-d tensor of `count` elements, on the CPU of every rank; collective."""

    def pieces() -> Iterator[Tensor]:
        for first in range(0, max(1, count), _PIECE_ELEMENTS):
            piece = None if tensor is None else tensor.narrow(0, first, min(_PIECE_ELEMENTS, count - first)).clone()
            received = ranks.from_main(piece)
            assert received is not None
            yield received

    return torch.cat(list(pieces()))


def _told_structure(content: dict[str, Any] | None, *, ranks: Ranks) -> dict[str, Any] | None:
    """Rank 0's nested structure, its tensors piece by piece."""
    structure, tensors = left_out(content)
    structure, shapes = ranks.from_main((structure, [tensor.shape for tensor in tensors]))
    mine = [*tensors] if ranks.place.is_main else [None] * len(shapes)
    received = [
        told(None if each is None else each.reshape(-1), shape.numel(), ranks=ranks).view(shape)
        for each, shape in zip(mine, shapes, strict=True)
    ]
    return put_back(structure, received)


def _nothing(shard: int, flat: int, of: str) -> Tensor:
    raise AssertionError("it comes from rank 0")

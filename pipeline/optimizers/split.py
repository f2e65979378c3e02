"""LAMB and Muon where each process has pieces of the tensors (ZeRO 1 and 2), whose laws need them whole.

State stays in equal pieces, which ZeRO may cut anywhere. LAMB sums squared norms of a tensor's pieces over the
processes: 16 bytes a tensor, in one message. For Muon each matrix travels to one process, which orthogonalises it, and
back: two messages in bf16, in which Muon computes, so nothing more is rounded. A process sends and holds 4 bytes for
each element of its pieces, 1/n of the matrices. A matrix that one process has whole stays there. The host never waits.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from shardvit.pipeline.optimizers.adam import Lamb, PieceAdamW
from shardvit.pipeline.optimizers.muon import Muon, orthogonalised, orthogonalising_flops, scale_of
from shardvit.pipeline.optimizers.pieces import CHUNK_ELEMENTS, Chunk, PieceOptimizer, StepTerms


@dataclass(frozen=True)
class SplitTensors:
    """Tensors cut over processes: their shapes by number, and by process how many elements of which it has. Processes
    with elements of one tensor have them in the order of their ranks."""

    shapes: tuple[tuple[int, ...], ...]
    shares: tuple[Mapping[int, int], ...]
    rank: int

    def owners(self) -> list[int]:
        """Give each matrix to the process that has it whole; others, the most work first, to the least busy one."""
        owners, work = [-1] * len(self.shapes), [0.0] * len(self.shares)
        whole = {
            number: rank
            for rank, share in enumerate(self.shares)
            for number, count in share.items()
            if count == math.prod(self.shapes[number])
        }
        flops = [orthogonalising_flops(shape) for shape in self.shapes]
        for number in sorted(range(len(owners)), key=lambda number: (number not in whole, -flops[number])):
            owners[number] = whole.get(number, work.index(min(work)))
            work[owners[number]] += flops[number]
        return owners


class _SplitOptimizer(PieceOptimizer):
    """A group's `tensors` are the numbers of those in `split` that its parameters are pieces of."""

    def __init__(self, groups: Any, *, split: SplitTensors, **defaults: Any) -> None:
        super().__init__(groups, **defaults)
        self._split = split

    def shape(self, group: dict[str, Any], number: int) -> None:
        return None

    def step_chunks(self, chunks: Sequence[Chunk], terms: StepTerms) -> None:
        super().step_chunks([chunk for chunk in chunks if chunk.tensors[0] < 0], terms)
        self.step_split([chunk for chunk in chunks if chunk.tensors[0] >= 0], terms)

    def step_split(self, chunks: Sequence[Chunk], terms: StepTerms) -> None:
        """Move state and weights of what is cut; collective."""
        raise NotImplementedError


class SplitLamb(_SplitOptimizer, Lamb):
    """LAMB; squared norms are added up in float64."""

    def __init__(self, groups: Any, *, split: SplitTensors, **defaults: Any) -> None:
        super().__init__(groups, split=split, **defaults)
        self._places: dict[tuple[int, ...], Tensor] = {}  # on the device, as a copy in each step would wait for it

    def step_split(self, chunks: Sequence[Chunk], terms: StepTerms) -> None:
        squares = torch.zeros(2, len(self._split.shapes), dtype=torch.float64, device=terms.skip.device)
        for chunk in chunks:
            change = chunk.decay()
            PieceAdamW.descend(self, chunk, change, terms)
            norms = [torch.stack(torch._foreach_norm(each)) for each in (chunk.weights, chunk.cut(change))]
            squares.index_add_(1, self._placed(chunk.tensors, squares), torch.stack(norms).double().square_())
            torch._foreach_copy_(chunk.gradients, chunk.cut(change))
        if len(self._split.shares) > 1:
            distributed.all_reduce(squares)
        weight, update = squares.sqrt_().float()
        ratios = torch.where(torch.minimum(weight, update) > 0, weight / update, 1.0)
        for chunk in chunks:
            change, sizes = torch.cat(chunk.gradients), tuple(each.numel() for each in chunk.gradients)
            own, counts = ratios[self._placed(chunk.tensors, ratios)], self._placed(sizes, ratios)
            change.mul_(torch.repeat_interleave(own, counts, output_size=change.numel()))
            chunk.move(change, terms)

    def _placed(self, numbers: tuple[int, ...], like: Tensor) -> Tensor:
        if numbers not in self._places:
            self._places[numbers] = torch.tensor(numbers, device=like.device)
        return self._places[numbers]


class SplitMuon(_SplitOptimizer, Muon):
    """Muon, of which each process orthogonalises its share of the matrices."""

    def __init__(self, groups: Any, *, split: SplitTensors, **defaults: Any) -> None:
        super().__init__(groups, split=split, **defaults)
        self._exchange = _Exchange(split)

    def step_split(self, chunks: Sequence[Chunk], terms: StepTerms) -> None:
        for chunk in chunks:
            torch._foreach_copy_(chunk.gradients, chunk.cut(self.ahead(chunk, terms)))
        pieces = {
            number: each.grad
            for group in self.param_groups
            for number, each in zip(group.get("tensors", ()), group["params"], strict=False)
            if number >= 0
        }
        self._exchange(pieces, device=terms.skip.device)
        for chunk in chunks:
            update = torch.cat(chunk.gradients)
            torch._foreach_mul_(chunk.cut(update), [scale_of(self._split.shapes[number]) for number in chunk.tensors])
            chunk.move(chunk.decay().sub_(update), terms)


class _Exchange:
    """Brings the pieces of each matrix to its owner, orthogonalises it there, and brings them back."""

    def __init__(self, split: SplitTensors) -> None:
        owners, ranks, mine = split.owners(), range(len(split.shares)), split.shares[split.rank]
        self._sent = sorted(mine, key=lambda number: (owners[number], number))
        self._sent_sizes = [mine[number] for number in self._sent]
        self._sends = [sum(count for number, count in mine.items() if owners[number] == rank) for rank in ranks]
        arriving = [
            (rank, number, count)
            for rank in ranks
            for number, count in sorted(split.shares[rank].items())
            if owners[number] == split.rank
        ]
        self._arriving_sizes = [count for _, _, count in arriving]
        self._receives = [sum(count for each, _, count in arriving if each == rank) for rank in ranks]
        parts = dict[int, list[int]]()  # of my matrices, in their order
        for place, (_, number, _) in enumerate(arriving):
            parts.setdefault(number, []).append(place)
        self._batches = [
            (shape, [place for number in numbers for place in parts[number]])
            for shape, numbers in _batches(sorted(parts), split.shapes)
        ]

    def __call__(self, pieces: Mapping[int, Tensor], *, device: torch.device) -> None:
        """Replace each piece, float32, by that of the orthogonalised matrix; collective."""
        own = [pieces[number] for number in self._sent]
        sent = torch.empty(sum(self._sends), dtype=torch.bfloat16, device=device)
        received = torch.empty(sum(self._receives), dtype=torch.bfloat16, device=device)
        cut = list(sent.split(self._sent_sizes))
        if own:
            torch._foreach_copy_(cut, own)
        self._send(received, sent, self._receives, self._sends)
        arrived = received.split(self._arriving_sizes)
        for shape, places in self._batches:
            parts = [arrived[place] for place in places]
            made = orthogonalised(torch.cat(parts).view(-1, *shape)).reshape(-1)
            torch._foreach_copy_(parts, list(made.split([each.numel() for each in parts])))
        self._send(sent, received, self._sends, self._receives)
        if own:
            torch._foreach_copy_(own, cut)

    @staticmethod
    def _send(target: Tensor, source: Tensor, receives: list[int], sends: list[int]) -> None:
        if len(sends) > 1:
            distributed.all_to_all_single(target, source, receives, sends)
        else:
            target.copy_(source)


def _batches(numbers: Iterable[int], shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Join equal matrices, as many as a chunk has room for, or one."""
    by_shape = dict[tuple[int, ...], list[int]]()
    for number in numbers:
        by_shape.setdefault(shapes[number], []).append(number)
    for shape, equal in by_shape.items():
        most = max(1, CHUNK_ELEMENTS // math.prod(shape))
        yield from ((shape, equal[first : first + most]) for first in range(0, len(equal), most))

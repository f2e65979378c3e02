"""`PieceOptimizer`: steps many tensors with a few operations on the device; base of the optimizers that torch lacks.

Tensors are joined, or stacked with others of their shape, up to 16 million elements at a time. Learning rate and weight
decay belong to each tensor, so more groups cost no more operations. `grad_scale` and `found_inf` are tensors, as for
torch's fused optimizers: the host reads nothing, and a skipped step changes nothing. Costs two to five temporaries of
64 MiB, or of the size of the largest tensor that cannot be cut. Steps may overwrite gradients.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # 64 MiB of float32: bounds a step's temporaries


class StepTerms(NamedTuple):
    """How to apply the gradients; scalars on their device, float32 unless noted."""

    skip: Tensor  # 1: change nothing, else 0
    skipped: Tensor  # the same as a bool
    applied: Tensor  # 1 - skip
    divisor: Tensor | None  # of the gradients


@dataclass(frozen=True)
class Chunk:
    """Pieces of parameters, flattened, with their gradients, state, learning rates and weight decays."""

    shape: tuple[int, ...] | None  # of each piece; None: of any, as its law is elementwise
    weights: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    states: tuple[dict[str, Tensor], ...]
    tensors: tuple[int, ...]  # numbers of tensors of whose pieces ranks hold some each (`SplitTensors`); else -1
    rates: tuple[float, ...]
    decays: tuple[float, ...]

    def state(self, name: str) -> list[Tensor]:
        return [each[name] for each in self.states]

    def gradient(self, terms: StepTerms) -> Tensor:
        """Join the clipped gradients; zeros in a step that is skipped."""
        flat = torch.cat(self.gradients)
        if terms.divisor is not None:
            flat.div_(terms.divisor)
        return flat.masked_fill_(terms.skipped, 0.0)

    def cut(self, flat: Tensor) -> list[Tensor]:
        """View the pieces in a joined tensor."""
        return list(flat.split([each.numel() for each in self.weights]))

    def decay(self) -> Tensor:
        """Join the weights, times minus their decay."""
        change = torch.cat(self.weights)
        torch._foreach_mul_(self.cut(change), [-each for each in self.decays])
        return change

    def move(self, change: Tensor, terms: StepTerms) -> None:
        """Add a change at a learning rate of 1, which it overwrites."""
        pieces = self.cut(change)
        torch._foreach_mul_(pieces, self.rates)
        change.mul_(terms.applied)
        torch._foreach_add_(self.weights, pieces)


class PieceOptimizer(torch.optim.Optimizer, ABC):
    """Keeps the state `moment` in `moment_type`."""

    moment: ClassVar[str]
    _step_supports_amp_scaling = True  # tells torch that `step` reads `grad_scale` and `found_inf`

    def __init__(self, groups: Any, *, moment_type: torch.dtype = torch.float32, **defaults: Any) -> None:
        self.moment_type = moment_type
        super().__init__(groups, {"weight_decay": 0.0, "fused": True, **defaults})  # fused: keeps `step` on the device

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        chunks = list(self._chunks())
        if (skip := getattr(self, "found_inf", None)) is None:
            if not chunks:
                return
            skip = torch.zeros((), device=chunks[0].weights[0].device)
        terms = StepTerms(skip, skipped=skip > 0, applied=1 - skip, divisor=getattr(self, "grad_scale", None))
        states = [state for chunk in chunks for state in chunk.states if "step" in state]
        if counts := {id(each["step"]): each["step"] for each in states}:  # a parameter that was cut has one
            torch._foreach_add_([*counts.values()], terms.applied, alpha=1)  # without alpha, torch reads a scalar
        self.step_chunks(chunks, terms)

    def step_chunks(self, chunks: Sequence[Chunk], terms: StepTerms) -> None:
        """Move state and weights."""
        for chunk in chunks:
            change = chunk.decay()
            self.descend(chunk, change, terms)
            chunk.move(change, terms)

    @abstractmethod
    def descend(self, chunk: Chunk, change: Tensor, terms: StepTerms) -> None:
        """Move the state, and subtract the update from `change`, the joined weights times minus their decay. In a step
        that is skipped the state must stay, and `change` finite."""

    @abstractmethod
    def start(self, parameter: Tensor, shape: tuple[int, ...] | None) -> dict[str, Tensor]:
        """Make a parameter's state before its first step."""

    def shape(self, group: dict[str, Any], number: int) -> tuple[int, ...] | None:
        """Return the shape in which to stack a group's parameter, or its equal parts; None: its law is elementwise."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep this optimizer's hyperparameters, and undo torch's casts to float32. Takes timm's states too."""
        states = {number: dict(state) for number, state in state_dict["state"].items()}
        groups: list[dict[str, Any]] = []
        for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            groups.append({**own, "params": saved["params"]})
            for number in saved["params"] if "step" in saved else ():  # timm's LAMB counts in its groups
                states[number]["step"] = saved["step"].clone()
        super().load_state_dict({**state_dict, "state": states, "param_groups": groups})
        for state in self.state.values():
            state.pop("use_muon", None)  # timm's
            if self.moment in state:
                state[self.moment] = state[self.moment].to(self.moment_type)

    def _chunks(self) -> Iterator[Chunk]:
        filling: dict[Any, list[Any]] = {}
        room: dict[Any, int] = {}
        for group in self.param_groups:
            rate_and_decay = float(group["lr"]), float(group["weight_decay"])
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                shape = self.shape(group, number)
                state = self.state[parameter]
                if not state:
                    state.update(self.start(parameter, shape))
                size = CHUNK_ELEMENTS if shape is None else math.prod(shape)
                tensor = group["tensors"][number] if "tensors" in group else -1
                kind = shape, tensor >= 0
                for piece in _cut(parameter, state, size=size):
                    if room.get(kind, 0) < piece[0].numel():
                        if kind in filling:
                            yield Chunk(shape, *zip(*filling[kind], strict=True))
                        filling[kind], room[kind] = [], CHUNK_ELEMENTS
                    room[kind] -= piece[0].numel()
                    filling[kind].append((*piece, tensor, *rate_and_decay))
        yield from (Chunk(shape, *zip(*pieces, strict=True)) for (shape, _), pieces in filling.items())


def _cut(parameter: Tensor, state: dict[str, Tensor], *, size: int) -> Iterator[tuple[Any, ...]]:
    """Cut a parameter, its gradient and what of its state has its size."""
    count = parameter.numel()
    assert parameter.grad is not None
    weight, gradient = parameter.detach().view(-1), parameter.grad.reshape(-1)
    flat = {name: each.view(-1) for name, each in state.items() if each.ndim and each.numel() == count}
    for first in range(0, count, size):
        piece = slice(first, first + size)
        yield weight[piece], gradient[piece], state | {name: each[piece] for name, each in flat.items()}


@functools.cache
def rounded(value: float, dtype: torch.dtype) -> float:
    """Round to the nearest number of a type."""
    return float(torch.tensor(value, dtype=dtype))

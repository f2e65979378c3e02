"""Move one flat float32 tensor by several rules, its step judged, clipped and perhaps skipped on the device.

ZeRO 1 and 2 hand each process a piece of one flattened group. It is divided into segments of equal learning rate factor
and weight decay, each moved by torch's own fused kernel, which takes the clipping factor and the verdict as tensors: no
number comes to the host, and a step costs a handful of operations. Where torch has no kernel (a first moment in bf16),
the same is written in plain operations. Decay is decoupled, for SGD too. Does not import DeepSpeed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from pipeline.optimizers.bf16_moment import BF16_CHUNK_ELEMENTS, in_bf16
from pipeline.recipe.optimizer import OptimizerConfig


@dataclass(frozen=True)
class Rule:
    """Settings shared by the parameters of a segment."""

    lr_scale: float  # the segment's learning rate over the schedule's
    weight_decay: float  # multiplied by the segment's learning rate


@dataclass(frozen=True)
class Segment:
    """Elements `start` to `stop` of the flat tensor, and how they move."""

    start: int
    stop: int
    rule: Rule


def merged(pieces: Iterable[tuple[int, int, Rule]]) -> tuple[Segment, ...]:
    """The fewest segments over pieces (start, count, rule); padding between two of one rule belongs to them."""
    segments: list[Segment] = []
    for start, count, rule in sorted(pieces, key=lambda piece: piece[0]):
        first = segments.pop().start if segments and segments[-1].rule == rule else start
        segments.append(Segment(first, start + count, rule))
    return tuple(segments)


@dataclass(frozen=True)
class GradientVerdict:
    """Factors applied to a gradient; 0-dimensional float32 tensors on its device."""

    skip: Tensor  # 1: it is not finite, nothing may move; 0
    divisor: Tensor | None  # at least 1, to clip; None: nothing is clipped


@dataclass(frozen=True)
class Move:
    """Settings of one step of a segment."""

    lr: float  # of this segment
    weight_decay: float  # multiplied by that
    steps: Tensor  # counted before this one; to be counted on by those that `counts_steps`
    verdict: GradientVerdict


class FlatOptimizer(torch.optim.Optimizer, ABC):
    """Moves one flat tensor, the only parameter of its only group when `step` is called.

    Args:
        groups: of `parameter_groups`; they become one, in their order.
        judge: the flat gradient -> what is done with it; may be collective, is called once a step.

    Attributes:
        rules: of each parameter, by the names in `groups`.
        moments: names and types of what is kept beside the flat tensor.
    """

    counts_steps: bool
    moments: tuple[tuple[str, torch.dtype], ...]

    def __init__(
        self, groups: Iterable[dict[str, Any]], config: OptimizerConfig, *, judge: Callable[[Tensor], GradientVerdict]
    ) -> None:
        members, self.rules = [], dict[str, Rule]()
        for group in groups:
            members += group["params"]
            self.rules |= {name: Rule(group["lr_scale"], group["weight_decay"]) for name, _ in group["params"]}
        # `fused`: the counter of steps is on the device.
        self._config = config
        super().__init__([{"params": members, "lr_scale": 1.0, "fused": True}], {"lr": config.lr})
        self._judge = judge
        self._segments: tuple[Segment, ...] = ()
        self._steps: list[Tensor] = []

    def place(self, segments: Iterable[Segment]) -> None:
        """Say where in the flat tensor which rule holds; what is in no segment does not move."""
        self._segments = tuple(segments)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # which casts all to the parameter's type
        types = dict(self.moments)
        for state in self.state.values():
            state.update({key: value.to(types[key]) for key, value in state.items() if key in types})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Closures are not supported."""
        if closure is not None:
            raise ValueError("closures are not supported: compute the gradients before")
        (group,) = self.param_groups
        (master,) = group["params"]
        verdict, steps = self._judge(master.grad), self._counters(master)
        for number, segment in enumerate(self._segments):

            def part(tensor: Tensor, segment: Segment = segment) -> Tensor:
                return tensor.detach()[segment.start : segment.stop]

            self.move(
                part(master),
                part(master.grad),
                *(part(self.state[master][name]) for name, _ in self.moments),
                by=Move(
                    lr=group["lr"] * segment.rule.lr_scale,
                    weight_decay=segment.rule.weight_decay,
                    steps=steps[number],
                    verdict=verdict,
                ),
            )

    @abstractmethod
    def move(self, weight: Tensor, gradient: Tensor, *moments: Tensor, by: Move) -> None:
        """One step of a segment, in place; may overwrite the gradient."""

    def _counters(self, master: Tensor) -> list[Tensor]:
        """A counter of steps for each segment, as torch's kernels count; the first is the one that is saved."""
        state = self.state[master]
        for name, dtype in self.moments:
            if name not in state:
                state[name] = torch.zeros_like(master, dtype=dtype, requires_grad=False)
        saved = state.get("step")
        if saved is None:
            saved = torch.zeros((), device=master.device)
            if self.counts_steps:
                state["step"] = saved
        if not self._steps or self._steps[0] is not saved:
            self._steps = [saved, *(saved.clone() for _ in self._segments[1:])]
        return self._steps


class FlatAdamW(FlatOptimizer):
    """torch's AdamW."""

    counts_steps = True
    moments = (("exp_avg", torch.float32), ("exp_avg_sq", torch.float32))

    def move(self, weight: Tensor, gradient: Tensor, *moments: Tensor, by: Move) -> None:
        first, second = moments
        beta1, beta2 = self._config.betas
        adamw(
            [weight],
            [gradient],
            [first],
            [second],
            [],
            [by.steps],
            fused=True,
            grad_scale=by.verdict.divisor,
            found_inf=by.verdict.skip,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=by.lr,
            weight_decay=by.weight_decay,
            eps=self._config.eps,
            maximize=False,
        )


class FlatSgd(FlatOptimizer):
    """torch's SGD, with decoupled decay as `optim.DecoupledSgd`."""

    counts_steps = False

    @property
    def moments(self) -> tuple[tuple[str, torch.dtype], ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (("momentum_buffer", torch.float32),) if self._config.momentum else ()

    def move(self, weight: Tensor, gradient: Tensor, *moments: Tensor, by: Move) -> None:
        if by.weight_decay:
            weight.mul_(1 - by.lr * by.weight_decay * (1 - by.verdict.skip))
        sgd(
            [weight],
            [gradient],
            [*moments] or [None],  # zeros at first: torch would leave them as allocated if the first step is skipped
            fused=True,
            grad_scale=by.verdict.divisor,
            found_inf=by.verdict.skip,
            weight_decay=0.0,
            momentum=self._config.momentum,
            lr=by.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


class FlatAdamWBf16(FlatOptimizer):
    """Same arithmetic as `bf16_moment.AdamWBf16`."""

    counts_steps = True
    moments = (("exp_avg", torch.bfloat16), ("exp_avg_sq", torch.float32))

    def move(self, weight: Tensor, gradient: Tensor, *moments: Tensor, by: Move) -> None:
        beta1, beta2 = self._config.betas
        applied = 1 - by.verdict.skip.double()
        by.steps.add_(applied)
        count = by.steps.double().clamp_(min=1)  # 0: the first step of all is skipped
        keep1, add1 = 1 - applied * (1 - in_bf16(beta1)), applied * (1 - beta1)
        keep2, add2 = 1 - applied * (1 - beta2), applied * (1 - beta2)
        rate, root = applied * by.lr / (1 - beta1**count), (1 - beta2**count).sqrt()
        numbers = torch.stack([keep1, add1, keep2, add2, rate, root, 1 - applied * by.lr * by.weight_decay]).float()
        keep1, add1, keep2, add2, rate, root, shrink = numbers.unbind()
        for part, change, first, second in _chunks(weight, gradient, *moments):
            change = _usable(change, by.verdict)
            exact = first.float().mul_(keep1).add_(change * add1)
            second.mul_(keep2).add_(change.square_().mul_(add2))
            part.mul_(shrink).sub_(exact.div(second.sqrt().div_(root).add_(self._config.eps)).mul_(rate))
            first.copy_(exact)


class FlatSgdBf16(FlatOptimizer):
    """Same arithmetic as `bf16_moment.SgdBf16`."""

    counts_steps = False
    moments = (("momentum_buffer", torch.bfloat16),)

    def move(self, weight: Tensor, gradient: Tensor, *moments: Tensor, by: Move) -> None:
        applied = 1 - by.verdict.skip
        keep = 1 - applied * (1 - in_bf16(self._config.momentum))
        rate, shrink = applied * by.lr, 1 - applied * (by.lr * by.weight_decay)
        for part, change, kept in _chunks(weight, gradient, *moments):
            exact = kept.float().mul_(keep).add_(_usable(change, by.verdict))
            part.mul_(shrink).sub_(exact * rate)
            kept.copy_(exact)


def flat_optimizer(
    groups: Iterable[dict[str, Any]], config: OptimizerConfig, *, judge: Callable[[Tensor], GradientVerdict]
) -> FlatOptimizer:
    """The flat form of a recipe's optimizer, of those that take pieces of parameters."""
    match config.name, config.first_moment:
        case "adamw", "float32":
            return FlatAdamW(groups, config, judge=judge)
        case "adamw", "bf16":
            return FlatAdamWBf16(groups, config, judge=judge)
        case "sgd", "float32":
            return FlatSgd(groups, config, judge=judge)
        case "sgd", "bf16":
            return FlatSgdBf16(groups, config, judge=judge)
        case _:
            raise AssertionError(f"{config.name} takes whole parameters")


def _usable(gradient: Tensor, verdict: GradientVerdict) -> Tensor:
    """A copy, clipped, or zeros if it is not finite."""
    clipped = gradient if verdict.divisor is None else gradient / verdict.divisor
    return torch.where(verdict.skip > 0, 0.0, clipped)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(BF16_CHUNK_ELEMENTS) for tensor in tensors), strict=True)

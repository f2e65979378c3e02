"""Step one flat float32 tensor by several rules; clip it, or skip the step, on the device.

ZeRO 1 and 2 hand each process a piece of one flattened group. It is divided into segments of equal learning rate factor
and weight decay, each a parameter of the recipe's own optimizer, which takes the clipping factor and the verdict as
tensors: no number comes to the host, and a step costs a handful of operations. Does not import DeepSpeed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.optimizers.optim import optimizer_over, set_lr
from pipeline.recipe.optimizer import OptimizerConfig
from pipeline.recipe.vocabulary import OPTIMIZERS


class GradientVerdict(NamedTuple):
    """What becomes of a gradient; 0-dimensional float32 tensors on its device."""

    skip: Tensor  # 1: it is not finite, nothing may move; 0
    divisor: Tensor | None  # at least 1, to clip; None: nothing is clipped


class FlatOptimizer(torch.optim.Optimizer):
    """Steps the flat tensor that has become the only parameter of its only group.

    Args:
        groups: of `parameter_groups`; they become one, in their order.
        judge: the flat gradient -> its verdict; may be collective, is called once a step.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], config: OptimizerConfig, *, judge: Callable[[Tensor], GradientVerdict]
    ) -> None:
        assert OPTIMIZERS[config.name].takes == "pieces", f"{config.name} takes whole parameters"
        members, self._rules = [], dict[str, dict[str, float]]()
        for group in groups:
            members += group["params"]
            rule = {key: group[key] for key in ("lr_scale", "weight_decay")}
            self._rules |= {name: rule for name, _ in group["params"]}
        super().__init__([{"params": members, "lr_scale": 1.0, "fused": True}], {"lr": config.lr})
        self._config, self._judge = config, judge
        self._segments: list[tuple[int, int, dict[str, float]]] = []
        self._inner: torch.optim.Optimizer | None = None
        self._bound: list[Tensor] = []  # the flat tensors that `_inner` steps pieces of

    def place(self, pieces: Mapping[str, tuple[int, int]]) -> None:
        """Set where in the flat tensor (start, count) each parameter lies; what lies nowhere does not move. Padding
        between two neighbours of one rule moves with them."""
        self._segments, self._bound = [], []
        for name, (start, count) in sorted(pieces.items(), key=lambda piece: piece[1]):
            rule = self._rules[name]
            first = self._segments.pop()[0] if self._segments and self._segments[-1][2] == rule else start
            self._segments.append((first, start + count, rule))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Without closures."""
        (group,) = self.param_groups
        (master,) = group["params"]
        verdict = self._judge(master.grad)
        inner: Any = self._optimizer_of(master)
        if inner is None:
            return
        for (start, stop, _), each in zip(self._segments, inner.param_groups, strict=True):
            each["params"][0].grad = master.grad[start:stop]
        inner.found_inf, inner.grad_scale = verdict
        set_lr(inner.param_groups, group["lr"])
        inner.step()
        inner.zero_grad()  # lets go of the flat gradient

    def _optimizer_of(self, master: Tensor) -> torch.optim.Optimizer | None:
        """The optimizer over the segments, its moments pieces of the flat state; None: there are no segments."""
        state = self.state[master]
        flat = [master, *state.values()]
        if len(flat) == len(self._bound) and all(map(operator.is_, flat, self._bound)):
            return self._inner
        self._complete(state, master)
        groups = [{"params": [master.detach()[start:stop]], **rule} for start, stop, rule in self._segments]
        inner: Any = optimizer_over(groups, self._config) if groups else None
        for number, (start, stop, _) in enumerate(self._segments):
            own = {name: tensor[start:stop] for name, tensor in state.items() if name != "step"}
            if "step" in state:  # each segment counts; the first count is the one that is saved
                own["step"] = state["step"].clone() if number else state["step"]
            inner.state[groups[number]["params"][0]] = own
        self._inner, self._bound = inner, [master, *state.values()]
        return inner

    def _complete(self, state: dict[str, Tensor], master: Tensor) -> None:
        """Make what is not there yet, as zeros; cast what torch's `load_state_dict` has cast to float32."""
        config, known = self._config, OPTIMIZERS[self._config.name]
        for name in known.moments:
            rounded = name == known.rounded and config.first_moment == "bf16"
            dtype = torch.bfloat16 if rounded else torch.float32
            if name in state:
                state[name] = state[name].to(dtype)
            elif config.name != "sgd" or config.momentum or rounded:  # torch's SGD keeps none without momentum
                state[name] = torch.zeros_like(master, dtype=dtype, requires_grad=False)
        if config.name == "adamw" and "step" not in state:
            state["step"] = torch.zeros((), device=master.device)

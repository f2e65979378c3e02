"""Judge, clip and step one flat float32 tensor by several rules, all on the device.

ZeRO 1 and 2 hand each process a piece of one flattened group. `GradientJudge` finds the norm over all ranks, whether it
is finite, and which flags the ranks raise, by one message a step (none in a single process). The piece is divided into
segments of equal learning rate factor and weight decay, each a parameter of the recipe's own optimizer, which takes the
clipping factor and the verdict as tensors: no number comes to the host. Does not import DeepSpeed.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from pipeline.optimizers.optim import optimizer_over
from pipeline.recipe.optimizer import OptimizerConfig
from pipeline.recipe.vocabulary import OPTIMIZERS

_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_'s
_ROW_ELEMENTS = 1 << 16


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
            each["lr"] = group["lr"] * each["lr_scale"]
        inner.found_inf, inner.grad_scale = verdict
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


class GradientJudge:
    """Judges the pieces that the ranks hold of one gradient; `clip_grad_norm` 0: nothing is clipped.

    Attributes:
        flags: of this rank, sent with the next norm.
        numbers: of the last gradient, see `Engine.step`.
    """

    def __init__(self, *, clip_grad_norm: float) -> None:
        self.flags: tuple[bool, ...] = ()
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


def _norm(flat: Tensor) -> Tensor:
    """The norm by rows: on a CPU, torch's sum of 10^8 squares at once is wrong by half a percent."""
    rows = flat.numel() // _ROW_ELEMENTS
    body, rest = flat[: rows * _ROW_ELEMENTS].view(rows, _ROW_ELEMENTS), flat[rows * _ROW_ELEMENTS :]
    norms = torch.cat([torch.linalg.vector_norm(body, dim=1), torch.linalg.vector_norm(rest, dim=0, keepdim=True)])
    return torch.linalg.vector_norm(norms.double())

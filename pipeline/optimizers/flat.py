"""Check, clip and step one flat float32 tensor under several rules, all on the device.

ZeRO 1 and 2 give each process a piece of one flattened group. `GradientJudge` finds the norm over all ranks, whether it
is finite, and the ranks' flags, in one message a step (none in a single process). Segments of equal learning rate
factor and weight decay become the parameters of the recipe's optimizer, which takes the clipping factor and the verdict
as tensors, so the host never waits. Does not import DeepSpeed.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from shardvit.pipeline.optimizers.optim import optimizer_over
from shardvit.pipeline.recipe.optimizer import OptimizerConfig
from shardvit.pipeline.recipe.vocabulary import OPTIMIZERS

_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_ROW_ELEMENTS = 1 << 16


class GradientVerdict(NamedTuple):
    """How to apply a gradient; float32 scalars on its device."""

    skip: Tensor  # 1 if it is not finite and nothing may change, else 0
    divisor: Tensor | None  # at least 1, to clip; None: no clipping


class FlatOptimizer(torch.optim.Optimizer):
    """Steps the flat tensor that DeepSpeed makes of `groups`; calls `judge`, perhaps collective, once a step."""

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
        self._bound: list[Tensor] = []  # flat tensors whose pieces `_inner` steps

    def place(self, pieces: Mapping[str, tuple[int, int]]) -> None:
        """Set each parameter's (start, count) in the flat tensor; uncovered elements stay fixed. Padding between two
        neighbours of one rule moves with them."""
        self._segments, self._bound = [], []
        for name, (start, count) in sorted(pieces.items(), key=lambda piece: piece[1]):
            rule = self._rules[name]
            first = self._segments.pop()[0] if self._segments and self._segments[-1][2] == rule else start
            self._segments.append((first, start + count, rule))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
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
        inner.zero_grad()  # releases the flat gradient

    def _optimizer_of(self, master: Tensor) -> torch.optim.Optimizer | None:
        """Return the optimizer over the segments, its moments views of the flat state; None if there are none."""
        state = self.state[master]
        flat = [master, *state.values()]
        if len(flat) == len(self._bound) and all(map(operator.is_, flat, self._bound)):
            return self._inner
        self._complete(state, master)
        groups = [{"params": [master.detach()[start:stop]], **rule} for start, stop, rule in self._segments]
        rates = "few" if self._config.layer_decay == 1.0 else "many"
        inner: Any = optimizer_over(groups, self._config, rates=rates) if groups else None
        for number, (start, stop, _) in enumerate(self._segments):
            own = {name: tensor[start:stop] for name, tensor in state.items() if name != "step"}
            if "step" in state:  # each segment counts; the first one's count is saved
                own["step"] = state["step"].clone() if number else state["step"]
            inner.state[groups[number]["params"][0]] = own
        self._inner, self._bound = inner, [master, *state.values()]
        return inner

    def _complete(self, state: dict[str, Tensor], master: Tensor) -> None:
        """Create missing moments as zeros; undo `load_state_dict`'s casts to float32."""
        config, known = self._config, OPTIMIZERS[self._config.name]
        for name in known.moments:
            rounded = name == known.rounded and config.first_moment == "bf16"
            dtype = torch.bfloat16 if rounded else torch.float32
            if name in state:
                state[name] = state[name].to(dtype)
            elif config.name != "sgd" or config.momentum or rounded:  # torch's SGD has none without momentum
                state[name] = torch.zeros_like(master, dtype=dtype, requires_grad=False)
        if config.name == "adamw" and "step" not in state:
            state["step"] = torch.zeros((), device=master.device)


class GradientJudge:
    """Checks a gradient held in pieces by the ranks; `clip_grad_norm` 0: no clipping. Sends this rank's `flags` with
    the next norm; `numbers` are the last gradient's, see `Engine.step`."""

    def __init__(self, *, clip_grad_norm: float) -> None:
        self.flags: tuple[bool, ...] = ()
        self.numbers = torch.empty(0)
        self._skipped: Tensor | None = None
        self._clip_grad_norm = clip_grad_norm

    def __call__(self, gradient: Tensor) -> GradientVerdict:
        """`gradient` is this rank's piece, float32, 1-d; collective."""
        shared = torch.zeros(1 + len(self.flags), dtype=torch.float64, device=gradient.device)
        shared[0] = _norm(gradient)
        for number, flag in enumerate(self.flags, start=1):
            if flag:
                shared[number].fill_(1.0)  # copying a host tensor would synchronise with the device
        if distributed.get_world_size() > 1:
            shared[0].square_()
            distributed.all_reduce(shared)
            shared[0].sqrt_()
        norm = shared[0].float()
        skip = (norm - norm).ne(0).float()  # 0 if finite, else nan
        self._skipped = skip.double() if self._skipped is None else self._skipped + skip
        self.numbers = torch.stack([norm, 1 - skip, *shared[1:].float()])
        if not self._clip_grad_norm:
            return GradientVerdict(skip=skip, divisor=None)
        return GradientVerdict(skip=skip, divisor=((norm + _EPS) / self._clip_grad_norm).clamp(min=1.0))

    def take_skipped(self) -> int:
        """Return and reset the count of non-finite gradients; waits for the device."""
        skipped, self._skipped = self._skipped, None
        return 0 if skipped is None else int(skipped)


def _norm(flat: Tensor) -> Tensor:
    """Compute the norm row by row: torch's CPU norm of 10^8 elements is off by half a percent."""
    rows = flat.numel() // _ROW_ELEMENTS
    body, rest = flat[: rows * _ROW_ELEMENTS].view(rows, _ROW_ELEMENTS), flat[rows * _ROW_ELEMENTS :]
    norms = torch.cat([torch.linalg.vector_norm(body, dim=1), torch.linalg.vector_norm(rest, dim=0, keepdim=True)])
    return torch.linalg.vector_norm(norms.double())

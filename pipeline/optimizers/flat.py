"""Check, clip and step flat float32 tensors under several rules, all on the device.

ZeRO 1 and 2 give each process a piece of each bucket's flattened parameters. `GradientJudge` finds the norm over all
ranks, whether it is finite, and the ranks' flags, in one message a step (none in a single process). Segments of equal
learning rate factor and weight decay become one group of the recipe's optimizer, which takes the clipping factor and
the verdict as tensors, so the host never waits. LAMB's and Muon's tensors are segments of their own (`split`). Does
not import DeepSpeed.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from shardvit.pipeline.optimizers.optim import optimizer_over
from shardvit.pipeline.optimizers.split import SplitTensors
from shardvit.pipeline.recipe.optimizer import OptimizerConfig
from shardvit.pipeline.recipe.vocabulary import OPTIMIZERS

_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_ROW_ELEMENTS = 1 << 16


class GradientVerdict(NamedTuple):
    """How to apply a gradient; float32 scalars on its device."""

    skip: Tensor  # 1 if it is not finite and nothing may change, else 0
    divisor: Tensor | None  # at least 1, to clip; None: no clipping


class _Rule(NamedTuple):
    lr_scale: float
    weight_decay: float
    splits: bool  # the law needs whole tensors


class _Segment(NamedTuple):
    """Elements of a bucket's flat tensor under one rule."""

    bucket: int
    start: int
    stop: int
    rule: _Rule
    tensor: int = -1  # under a rule that splits: the number of the tensor of which it is a piece

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop]


class FlatPiece(NamedTuple):
    """Elements `first` to `first + size` of a flattened parameter, at `start` in the flat tensor of a bucket."""

    bucket: int
    start: int
    size: int
    first: int = 0


class FlatOptimizer(torch.optim.Optimizer):
    """Steps the flat tensors that DeepSpeed makes of `buckets` by the rules of `groups`; calls `judge`, perhaps
    collective, once a step."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        config: OptimizerConfig,
        *,
        buckets: Iterable[Sequence[tuple[str, Tensor]]],
        judge: Callable[[Tensor], GradientVerdict],
    ) -> None:
        assert OPTIMIZERS[config.name].takes != "parameters", f"{config.name} takes whole parameters"
        self._rules = dict[str, _Rule]()
        self._tensors, self._shapes = dict[str, range](), list[tuple[int, ...]]()  # by name the numbers, and by number
        for group in groups:
            splits = group.get("orthogonal") or group.get("adapts", False)
            for number, (name, each) in enumerate(group["params"]):
                self._rules[name] = _Rule(group["lr_scale"], group["weight_decay"], splits)
                if splits:
                    parts = group["parts"][number] if "parts" in group else 1
                    self._tensors[name] = range(len(self._shapes), len(self._shapes) + parts)
                    self._shapes += [(each.shape[0] // parts, each[0].numel())] * parts
        flats = [{"params": [*bucket], "lr_scale": 1.0, "fused": True} for bucket in buckets]
        self._buckets = [[(name, each.numel()) for name, each in flat["params"]] for flat in flats]
        super().__init__(flats, {"lr": config.lr})
        self._config, self._judge = config, judge
        self._segments: list[_Segment] = []
        self._inner: torch.optim.Optimizer | None = None
        self._bound: list[Tensor] = []  # flat tensors whose pieces `_inner` steps

    def place(self, pieces: Mapping[str, FlatPiece]) -> None:
        """Set each parameter's piece; uncovered elements stay fixed. Padding between two neighbours of one rule moves
        with them."""
        self._segments, self._bound = [], []
        for name, (bucket, start, count, first) in sorted(pieces.items(), key=lambda piece: piece[1]):
            last, rule, stop = self._segments[-1] if self._segments else None, self._rules[name], start + count
            for number in self._tensors.get(name, ()):
                size = math.prod(self._shapes[number])
                begin = start - first + size * (number - self._tensors[name].start)
                if (one := max(start, begin)) < (end := min(stop, begin + size)):
                    self._segments.append(_Segment(bucket, one, end, rule, number))
            if rule.splits:
                continue
            if last and (last.bucket, last.rule) == (bucket, rule):
                start = self._segments.pop().start
            self._segments.append(_Segment(bucket, start, stop, rule))

    @torch.no_grad()
    def step_by(self, gradient: Tensor) -> None:
        """Step by the concatenated gradients of the flat tensors, float32."""
        verdict = self._judge(gradient)
        masters = [group["params"][0] for group in self.param_groups]
        inner: Any = self._optimizer_of(masters)
        if inner is None:
            return
        gradients = gradient.split([each.numel() for each in masters])
        for group in inner.param_groups:
            group["lr"] = self.param_groups[0]["lr"] * group["lr_scale"]
            for each, segment in zip(group["params"], group["segments"], strict=True):
                each.grad = segment.of(gradients[segment.bucket])
        inner.found_inf, inner.grad_scale = verdict
        inner.step()
        inner.zero_grad()  # releases the flat gradient

    def _optimizer_of(self, masters: Sequence[Tensor]) -> torch.optim.Optimizer | None:
        """Return the optimizer over the segments, its moments views of the flat states; None if there are none."""
        states = [self.state[master] for master in masters]
        flat = [*masters, *(each for state in states for each in state.values())]
        if len(flat) == len(self._bound) and all(map(operator.is_, flat, self._bound)):
            return self._inner
        for master, state, bucket in zip(masters, states, self._buckets, strict=True):
            self._complete(state, master, bucket)
        by_rule = dict[_Rule, list[_Segment]]()
        for segment in self._segments:
            by_rule.setdefault(segment.rule, []).append(segment)
        groups = [
            {
                "params": [each.of(masters[each.bucket].detach()) for each in segments],
                "segments": segments,
                "tensors": [each.tensor for each in segments],
                **rule._asdict(),
            }
            for rule, segments in by_rule.items()
        ]
        rates, split = "few" if self._config.layer_decay == 1.0 else "many", self._split(masters)
        if split and not groups:  # it has nothing, but may orthogonalise others' matrices
            groups = [{"params": [], "segments": [], "lr_scale": 1.0}]
        inner: Any = optimizer_over(groups, self._config, rates=rates, split=split) if groups else None
        counting = {segment.bucket: segment for segment in reversed(self._segments)}  # each bucket's first segment
        for group in groups:
            for segment, piece in zip(group["segments"], group["params"], strict=True):
                state = states[segment.bucket]
                own = {name: segment.of(each) for name, each in state.items() if name != "step"}
                if "step" in state:  # each segment counts; a bucket's first one's count is saved
                    own["step"] = state["step"] if counting[segment.bucket] is segment else state["step"].clone()
                inner.state[piece] = own
        self._inner, self._bound = inner, [*masters, *(each for state in states for each in state.values())]
        return inner

    def _split(self, masters: Sequence[Tensor]) -> SplitTensors | None:
        """Say which elements of split tensors each process has: its equal piece of each bucket."""
        if OPTIMIZERS[self._config.name].takes == "pieces":
            return None
        several = distributed.is_initialized()
        ranks, rank = (distributed.get_world_size(), distributed.get_rank()) if several else (1, 0)
        shares = tuple(dict[int, int]() for _ in range(ranks))
        for master, bucket in zip(masters, self._buckets, strict=True):
            begin, piece = 0, master.numel()
            for name, count in bucket:
                for at, number in enumerate(self._tensors.get(name, ())):
                    size = math.prod(self._shapes[number])
                    first, stop = begin + at * size, begin + (at + 1) * size
                    for each in range(first // piece, -(-stop // piece)):
                        shares[each][number] = min(stop, (each + 1) * piece) - max(first, each * piece)
                begin += count
        own = {each.tensor: each.stop - each.start for each in self._segments if each.tensor >= 0}
        assert shares[rank] == own, "DeepSpeed cuts buckets otherwise"
        return SplitTensors(tuple(self._shapes), shares, rank)

    def _complete(self, state: dict[str, Tensor], master: Tensor, bucket: Sequence[tuple[str, int]]) -> None:
        """Create missing moments as zeros; undo `load_state_dict`'s casts to float32. Muon's buckets have its momentum
        or AdamW's moments."""
        config, known = self._config, OPTIMIZERS[self._config.name]
        if config.name == "muon" and not self._rules[bucket[0][0]].splits:
            known = OPTIMIZERS["adamw"]
        for name in {*state} - {*known.moments, "step"}:
            del state[name]
        for name in known.moments:
            rounded = name == known.rounded and config.first_moment == "bf16"
            dtype = torch.bfloat16 if rounded else torch.float32
            if name in state:
                state[name] = state[name].to(dtype)
            elif config.name != "sgd" or config.momentum or rounded:  # torch's SGD has none without momentum
                state[name] = torch.zeros_like(master, dtype=dtype, requires_grad=False)
        if known.counts and "step" not in state:
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

"""Dropout, stochastic depth and patch dropout whose masks depend on random words, not on who draws them.

timm's and torch's modules draw from the process's generator, so a sample's mask depends on which process trains it and
beside which others. The modules here, which `by_sample` puts in their places, read two 32-bit words for each sample and
site (factor f, odd, and summand s), given before every forward pass; so a mask holds for any number of processes and
size of micro-batch, and recomputation (activation checkpointing) repeats it.

Element e of a sample is kept if (f T[e] + s) mod 2^32 is at least rate 2^32. T holds 32-bit words, all different, that
the samples and sites of a step share: a bijective hash of e and the step's word. Since s is uniform, so is every sum:
an element is dropped with probability `rate`, rounded to a multiple of 2^-32 (kept values are divided by the exact
share that is kept). Since f is random, the masks of two samples resemble one another (by 1 %) in one pair of 10^6, and
no more than that is asked of them.

Nothing is kept for the backward pass, which draws the mask again.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from timm.layers import DropPath, PatchDropout
from torch import Tensor, nn

_WORDS = 2**32
_HALF = 2**31  # words are kept as int32: a word minus 2^31 orders them alike


@dataclass
class SiteWords:
    """Random words of one site for the next forward pass of n samples. Tensors alone: compiled blocks, which would be
    compiled anew for each number that differs, share one graph."""

    factor: Tensor  # int32 [n]
    summand: Tensor  # int32 [n]
    branch: Tensor  # float32 [n]: 0, or what stochastic depth at this site multiplies a sample's branch by
    rate: float = 0.0  # of stochastic depth


class SampleWords:
    """Random words of the samples in the next forward pass, shared by the modules of one model."""

    def __init__(self) -> None:
        self.sites: list[str] = []  # names of the modules that draw
        self.step = torch.zeros((), dtype=torch.int32)  # the step's word, on the device
        self._words = torch.empty(0, 0, 2, dtype=torch.int32)
        self._step_word = 0
        self._at: dict[int, SiteWords] = {}
        self._thresholds: tuple[Tensor, Tensor] | None = None
        self._tables: dict[tuple[int, torch.device], Tensor] = {}

    def give(self, words: Tensor, *, step_word: int) -> None:
        """Set `words`, int32 [sites, n, 2] on the model's device, for the next n samples; `step_word`, below 2^32,
        is the same for all samples of a step."""
        if step_word != self._step_word or self.step.device != words.device:
            self._tables.clear()
            self.step = torch.full((), signed(step_word), dtype=torch.int32, device=words.device)
        self._words, self._step_word = words, step_word
        self._hand_out()

    def at(self, site: int, *, rate: float = 0.0) -> SiteWords:
        """Register the module at `site`; return what it reads, updated by each `give`. `rate`: of stochastic depth."""
        nothing = torch.empty(0, dtype=torch.int32)
        mine = self._at[site] = SiteWords(nothing, nothing, nothing.float(), rate)
        self._thresholds = None
        self._hand_out()
        return mine

    def _hand_out(self) -> None:
        words = self._words
        known = self._thresholds
        if known is None or len(known[0]) != len(words) or known[0].device != words.device:
            rates = [self._at[site].rate if site in self._at else 0.0 for site in range(len(words))]
            below = torch.tensor([dropped_words(rate) - _HALF for rate in rates], dtype=torch.int32)
            scale = torch.tensor([_scale(rate) for rate in rates], dtype=torch.float32)
            known = self._thresholds = below.to(words.device)[:, None], scale.to(words.device)[:, None]
        below, scale = known
        factors, summands = words[..., 0] | 1, words[..., 1]
        for site, *given in zip(range(len(words)), factors, summands, (summands >= below) * scale, strict=True):
            if mine := self._at.get(site):
                mine.factor, mine.summand, mine.branch = given

    def table(self, size: int, *, device: torch.device) -> Tensor:
        """T, int32 [size]; made once a step."""
        key = size, device
        if key not in self._tables:
            self._tables[key] = table_of(size, step=self.step.to(device))
        return self._tables[key]


def table_of(size: int, *, step: Tensor) -> Tensor:
    """T, int32 [size], of a step's word (int32, without dimensions)."""
    return mix_words(torch.arange(size, dtype=torch.int32, device=step.device) ^ step)


def signed(word: int) -> int:
    """A word below 2^32 as the int32 of the same bits."""
    return word - _WORDS if word >= _HALF else word


def mix_words(words: Tensor) -> Tensor:
    """A bijection of int32 in which every input bit affects every output bit: the finaliser of MurmurHash3, 32 bits
    (Appleby, 2011, public domain)."""
    words = (words ^ _shifted(words, 16)) * signed(0x85EBCA6B)
    words = (words ^ _shifted(words, 13)) * signed(0xC2B2AE35)
    return words ^ _shifted(words, 16)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift right, as if unsigned."""
    return (words >> bits) & (2 ** (32 - bits) - 1)


def dropped_words(rate: float) -> int:
    """Count of the 2^32 words that drop an element: `rate`, rounded, but never all."""
    return min(round(rate * _WORDS), _WORDS - 1)


def _scale(rate: float) -> float:
    return _WORDS / (_WORDS - dropped_words(rate))


def _check_count(given: SiteWords, x: Tensor) -> None:
    if len(given.summand) != len(x):
        raise RuntimeError(
            f"random words were given for {len(given.summand)} samples, and the forward pass has {len(x)}"
        )


class SampleDropout(nn.Dropout):
    """Elements [n, ...] are dropped one by one."""

    def __init__(self, rate: float, *, words: SampleWords, site: int) -> None:
        super().__init__(rate)
        self.words, self._given = words, words.at(site)

    def forward(self, input: Tensor) -> Tensor:  # torch's name for it
        """Drop elements while training."""
        if not self.training or not self.p:
            return input
        given, shape = self._given, input.shape[1:]
        _check_count(given, input)
        if torch.compiler.is_compiling():  # T is computed where it is used: a few integer operations, no memory
            table = table_of(prod(shape), step=self.words.step).view(shape)
            below, scale = dropped_words(self.p) - _HALF, _scale(self.p)
            return _drop_at_once(input, table, given.factor, given.summand, below, scale)
        table = self.words.table(prod(shape), device=input.device).view(shape)
        return _Dropped.apply(input, table, given.factor, given.summand, self.p)


class SampleDropPath(DropPath):
    """The branch of a residual block, [n, ...], is dropped for whole samples."""

    def __init__(self, rate: float, *, words: SampleWords, site: int) -> None:
        super().__init__(rate)
        self.words, self._given = words, words.at(site, rate=rate)

    def forward(self, x: Tensor) -> Tensor:
        """Drop samples' branches while training."""
        if not self.training:
            return x
        _check_count(self._given, x)
        return x * self._given.branch.to(x.dtype).view(-1, *[1] * (x.dim() - 1))


class SamplePatchDropout(PatchDropout):
    """Keep equally many patches of each sample of tokens [n, prefix + patches, D], in random order."""

    def __init__(self, rate: float, *, num_prefix_tokens: int, words: SampleWords, site: int) -> None:
        super().__init__(rate, num_prefix_tokens=num_prefix_tokens)
        self.words, self._given = words, words.at(site)

    def forward(self, x: Tensor) -> Tensor:
        """Leave out patches while training."""
        if not self.training or not self.prob:
            return x
        prefix, patches = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        count = patches.shape[1]
        _check_count(self._given, x)
        factor, summand = self._given.factor, self._given.summand
        table = self.words.table(count, device=x.device)
        # Bijections all, so no two patches of a sample are equal.
        ranks = mix_words(table * factor[:, None] + summand[:, None]).argsort(dim=1)
        stay = ranks[:, : max(1, int(count * (1 - self.prob)))]  # as many as timm's
        return torch.cat([prefix, patches.gather(1, stay[..., None].expand(-1, -1, x.shape[-1]))], dim=1)


def by_sample(model: nn.Module) -> None:
    """Replace the modules of `model` that draw from the process's generator, where their rate is not 0.

    Stochastic depth begins at rate 0, where timm has no module: one is put there as well, so that blocks are alike."""
    words = SampleWords()
    deep = any(isinstance(module, DropPath) and module.drop_prob for module in model.modules())
    for name, module in list(model.named_modules()):
        of_site = {"words": words, "site": len(words.sites)}
        match module:
            case nn.Dropout(p=rate) if rate:
                ours = SampleDropout(rate, **of_site)
            case DropPath(drop_prob=rate) if rate:
                ours = SampleDropPath(rate, **of_site)
            case nn.Identity() if deep and name.endswith((".drop_path1", ".drop_path2")):
                ours = SampleDropPath(0.0, **of_site)
            case PatchDropout():
                ours = SamplePatchDropout(module.prob, num_prefix_tokens=module.num_prefix_tokens, **of_site)
            case _:
                continue
        model.set_submodule(name, ours)
        words.sites.append(name)


def words_of(model: nn.Module) -> SampleWords | None:
    """Return the words that `by_sample` made the modules of `model` share; None if no module draws by sample."""
    ours = (SampleDropout, SampleDropPath, SamplePatchDropout)
    return next((module.words for module in model.modules() if isinstance(module, ours)), None)


class _Dropped(torch.autograd.Function):
    """x [n, ...] -> x with dropped elements; the gradient is dropped by the same mask, drawn again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, factor: Tensor, summand: Tensor, rate: float) -> Tensor:
        ctx.save_for_backward(table, factor, summand)
        ctx.rate = rate
        return drop(x, table=table, factor=factor, summand=summand, rate=rate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        table, factor, summand = ctx.saved_tensors
        return drop(gradient, table=table, factor=factor, summand=summand, rate=ctx.rate), None, None, None, None


def drop(x: Tensor, *, table: Tensor, factor: Tensor, summand: Tensor, rate: float) -> Tensor:
    """x [n, ...], each element times 0 or 1 / (1 - rate): `table` is T, of a sample's shape; `factor` and `summand` are
    int32 [n]."""
    below, scale = dropped_words(rate) - _HALF, _scale(rate)
    if x.device.type == "cpu":
        return _drop_one_by_one(x, table, factor, summand, below, scale)
    return _fused()(x, table, factor, summand, below, scale)


def _drop_one_by_one(x: Tensor, table: Tensor, factor: Tensor, summand: Tensor, below: int, scale: float) -> Tensor:
    """A sample fits into a CPU's cache, a micro-batch does not: two to five times as fast as all at once."""
    dropped = torch.empty_like(x)
    words, kept = torch.empty_like(table), torch.empty_like(table, dtype=torch.bool)
    for sample, into, f, s in zip(x, dropped, factor.tolist(), summand.tolist(), strict=True):
        torch.mul(table, f, out=words).add_(s)
        torch.ge(words, below, out=kept)
        torch.mul(sample, kept, out=into).mul_(scale)
    return dropped


def _drop_at_once(x: Tensor, table: Tensor, factor: Tensor, summand: Tensor, below: int, scale: float) -> Tensor:
    shape = (-1, *[1] * table.dim())
    return torch.where(table * factor.view(shape) + summand.view(shape) >= below, x * scale, 0)


@functools.cache
def _fused() -> Callable[..., Tensor]:
    """`_drop_at_once` as one kernel, which reads x and writes the result; as several kernels, words and masks would go
    through a GPU's memory as well."""
    compiled, works = torch.compile(_drop_at_once, dynamic=False), True

    def run(*arguments: Any) -> Tensor:
        nonlocal works
        if works:
            try:
                return compiled(*arguments)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                works = False
                warnings.warn(
                    f"dropout runs uncompiled, which costs more memory traffic ({type(error).__name__}); "
                    "dropout_masks: process is the way around",
                    stacklevel=2,
                )
        return _drop_at_once(*arguments)

    return run

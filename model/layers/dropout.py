"""Dropout, stochastic depth and patch dropout whose masks depend on random words, not on the process that draws them.

timm's and torch's modules draw from the process's generator, so a sample's mask depends on the process and batch that
train it. `by_sample` replaces them by the modules here, which read two 32-bit words per sample and site (factor f, odd,
and summand s), set before every forward pass. Masks are thus equal for any number of processes and micro-batch size;
activation checkpointing and the backward pass draw them again instead of keeping them.

Element e of a sample is kept if (f T[e] + s) mod 2^32 is at least rate 2^32. T holds distinct 32-bit words, shared by
the samples and sites of a step: a bijective hash of e and the step's word. Since s is uniform, so is every sum: an
element is dropped with probability `rate`, rounded to a multiple of 2^-32 (kept values are divided by the exact share
kept). Since f is random, only one pair of samples in 10^6 has masks that resemble each other (by 1 %).
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
_HALF = 2**31  # words are stored as int32: subtracting 2^31 keeps their order


@dataclass
class SiteWords:
    """One site's random words for the next n samples; tensors, as Python numbers would recompile blocks."""

    factor: Tensor  # int32 [n]
    summand: Tensor  # int32 [n]
    branch: Tensor  # float32 [n]: factor of a sample's branch under stochastic depth, 0 if dropped
    rate: float = 0.0  # stochastic depth's


class SampleWords:
    """Random words of the next forward pass's samples, shared by the modules of one model."""

    def __init__(self) -> None:
        self.sites: list[str] = []  # names of the drawing modules
        self.step = torch.zeros((), dtype=torch.int32)  # the step's word, on the device
        self._words = torch.empty(0, 0, 2, dtype=torch.int32)
        self._step_word = 0
        self._at: dict[int, SiteWords] = {}
        self._thresholds: tuple[Tensor, Tensor] | None = None
        self._tables: dict[tuple[int, torch.device], Tensor] = {}

    def give(self, words: Tensor, *, step_word: int) -> None:
        """Set `words`, int32 [sites, n, 2] on the model's device, for the next n samples; `step_word` < 2^32."""
        if step_word != self._step_word or self.step.device != words.device:
            self._tables.clear()
            self.step = torch.full((), signed(step_word), dtype=torch.int32, device=words.device)
        self._words, self._step_word = words, step_word
        self._hand_out()

    def at(self, site: int, *, rate: float = 0.0) -> SiteWords:
        """Register the module at `site`; return its words, updated by each `give`. `rate` is stochastic depth's."""
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
    """T, int32 [size], from a step's word (int32 scalar)."""
    return mix_words(torch.arange(size, dtype=torch.int32, device=step.device) ^ step)


def signed(word: int) -> int:
    """Reinterpret a word below 2^32 as int32."""
    return word - _WORDS if word >= _HALF else word


def mix_words(words: Tensor) -> Tensor:
    """A bijection of int32 that mixes all bits: MurmurHash3's 32-bit finaliser (Appleby, 2011, public domain)."""
    words = (words ^ _shifted(words, 16)) * signed(0x85EBCA6B)
    words = (words ^ _shifted(words, 13)) * signed(0xC2B2AE35)
    return words ^ _shifted(words, 16)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift right as if unsigned."""
    return (words >> bits) & (2 ** (32 - bits) - 1)


def dropped_words(rate: float) -> int:
    """Number of the 2^32 words that drop an element: `rate`, rounded, but never all."""
    return min(round(rate * _WORDS), _WORDS - 1)


def _scale(rate: float) -> float:
    return _WORDS / (_WORDS - dropped_words(rate))


def _check_count(given: SiteWords, x: Tensor) -> None:
    if len(given.summand) != len(x):
        raise RuntimeError(
            f"random words were given for {len(given.summand)} samples, and the forward pass has {len(x)}"
        )


class SampleDropout(nn.Dropout):
    """Drop single elements of [n, ...]."""

    def __init__(self, rate: float, *, words: SampleWords, site: int) -> None:
        super().__init__(rate)
        self.words, self._given = words, words.at(site)

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        if not self.training or not self.p:
            return input
        given, shape = self._given, input.shape[1:]
        _check_count(given, input)
        if torch.compiler.is_compiling():  # compute T inline: a few integer operations, no memory
            table = table_of(prod(shape), step=self.words.step).view(shape)
            below, scale = dropped_words(self.p) - _HALF, _scale(self.p)
            return _drop_at_once(input, table, given.factor, given.summand, below, scale)
        table = self.words.table(prod(shape), device=input.device).view(shape)
        return _Dropped.apply(input, table, given.factor, given.summand, self.p)


class SampleDropPath(DropPath):
    """Drop a residual branch [n, ...] for whole samples."""

    def __init__(self, rate: float, *, words: SampleWords, site: int) -> None:
        super().__init__(rate)
        self.words, self._given = words, words.at(site, rate=rate)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        _check_count(self._given, x)
        return x * self._given.branch.to(x.dtype).view(-1, *[1] * (x.dim() - 1))


class SamplePatchDropout(PatchDropout):
    """Keep equally many patches of each sample's tokens [n, prefix + patches, D], in random order."""

    def __init__(self, rate: float, *, num_prefix_tokens: int, words: SampleWords, site: int) -> None:
        super().__init__(rate, num_prefix_tokens=num_prefix_tokens)
        self.words, self._given = words, words.at(site)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.prob:
            return x
        prefix, patches = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        count = patches.shape[1]
        _check_count(self._given, x)
        factor, summand = self._given.factor, self._given.summand
        table = self.words.table(count, device=x.device)
        # Bijections, so no two patches of a sample are equal.
        ranks = mix_words(table * factor[:, None] + summand[:, None]).argsort(dim=1)
        stay = ranks[:, : max(1, int(count * (1 - self.prob)))]  # as many as timm's
        return torch.cat([prefix, patches.gather(1, stay[..., None].expand(-1, -1, x.shape[-1]))], dim=1)


def by_sample(model: nn.Module) -> None:
    """Replace the modules that draw from the process's generator at a rate above 0. With stochastic depth the first
    block (rate 0, no module in timm) gets one too, so blocks are alike."""
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
    """Return the words that `by_sample` gave the modules of `model`, or None."""
    ours = (SampleDropout, SampleDropPath, SamplePatchDropout)
    return next((module.words for module in model.modules() if isinstance(module, ours)), None)


class _Dropped(torch.autograd.Function):
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
    """Multiply each element of x [n, ...] by 0 or 1 / (1 - rate); `factor`, `summand`: int32 [n], `table`: T."""
    below, scale = dropped_words(rate) - _HALF, _scale(rate)
    if x.device.type == "cpu":
        return _drop_one_by_one(x, table, factor, summand, below, scale)
    return _fused()(x, table, factor, summand, below, scale)


def _drop_one_by_one(x: Tensor, table: Tensor, factor: Tensor, summand: Tensor, below: int, scale: float) -> Tensor:
    """Two to five times as fast as all samples together: one fits into a CPU's cache."""
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
    """Compile `_drop_at_once` into one kernel, so words and masks take no GPU memory."""
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

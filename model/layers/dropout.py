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
from typing import Any

import torch
from timm.layers import DropPath, PatchDropout
from torch import Tensor, nn

from shardvit.model.layers.chosen_tokens import chosen_tokens

_WORDS = 2**32
_HALF = 2**31  # words are stored as int32: subtracting 2^31 keeps their order
_PIECE = 2**16  # elements
_OF_MODEL = "sample_words"  # attribute of a model


@dataclass
class SiteWords:
    """One site's rows of `SampleWords`; tensors, as Python numbers would recompile blocks."""

    site: int
    factor: Tensor  # int32 [n]
    summand: Tensor  # int32 [n]
    branch: Tensor  # float32 [n]: factor of a sample's branch under stochastic depth, 0 if dropped


class SampleWords:
    """Random words of the next forward pass's samples, shared by the modules of one model. `give` overwrites them, so
    that a compiled block sees the same tensors in each step, and the host does nothing site by site."""

    def __init__(self) -> None:
        self.sites: list[str] = []  # names of the drawing modules
        self.step = torch.zeros((), dtype=torch.int32)  # the step's word, on the device
        self._step_word = 0
        self._rates: list[float] = []  # of stochastic depth, by site
        self._given: list[SiteWords] = []  # by site
        self._tables: dict[torch.Size, Tensor] = {}
        self._branches: dict[torch.dtype, Tensor] = {}
        self._make_room(0, device=self.step.device)

    def add(self, name: str, *, rate: float = 0.0) -> SiteWords:
        """Add a site; return its words, which each `give` changes. `rate` is stochastic depth's."""
        nothing = torch.empty(0)
        mine = SiteWords(len(self.sites), nothing.int(), nothing.int(), nothing)
        self.sites.append(name)
        self._rates.append(rate)
        self._given.append(mine)
        return mine

    def give(self, words: Tensor, *, step_word: int) -> None:
        """Set `words`, int32 [sites, n, 2] on the model's device, for the next n samples; `step_word` < 2^32. The host
        waits for a GPU only if n or the device has changed."""
        if words.shape[:2] != self._branch.shape or words.device != self._branch.device:
            self._make_room(words.shape[1], device=words.device)
        if step_word != self._step_word:
            self._tables.clear()
            self.step.fill_(signed(step_word))
            self._step_word = step_word
        self._words.copy_(words.movedim(-1, 0))
        self._words[0].bitwise_or_(1)
        torch.mul(self._words[1] >= self._below, self._scale, out=self._branch)
        self._branches.clear()

    def table(self, shape: torch.Size) -> Tensor:
        """T, int32 of `shape`; made once a step."""
        if shape not in self._tables:
            self._tables[shape] = table_of(shape, step=self.step)
        return self._tables[shape]

    def branch(self, given: SiteWords, *, dtype: torch.dtype) -> Tensor:
        """`given.branch` in `dtype`, which all sites' are made in at once."""
        if dtype not in self._branches:
            self._branches[dtype] = self._branch.to(dtype)
        return self._branches[dtype][given.site]

    def _make_room(self, count: int, *, device: torch.device) -> None:
        self._tables.clear()
        self.step = self.step.to(device)
        self._words = torch.empty(2, len(self.sites), count, dtype=torch.int32, device=device)
        self._branch = torch.empty(len(self.sites), count, device=device)
        kept = [_kept(rate) for rate in self._rates]
        self._below = torch.tensor([below for below, _ in kept], dtype=torch.int32, device=device)[:, None]
        self._scale = torch.tensor([scale for _, scale in kept], device=device)[:, None]
        for given, words, branch in zip(self._given, self._words.unbind(1), self._branch, strict=True):
            given.factor, given.summand, given.branch = *words, branch


def table_of(shape: torch.Size, *, step: Tensor) -> Tensor:
    """T, int32 of `shape`, from a step's word (int32 scalar)."""
    return mix_words(torch.arange(shape.numel(), dtype=torch.int32, device=step.device) ^ step).view(shape)


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


def _kept(rate: float) -> tuple[int, float]:
    """Return the least word that keeps an element, as int32, and the factor of what is kept."""
    dropped = dropped_words(rate)
    return dropped - _HALF, _WORDS / (_WORDS - dropped)


def _check_count(given: SiteWords, x: Tensor) -> None:
    count, samples = given.summand.shape[0], x.shape[0]  # `len` takes longer
    if count != samples:
        raise RuntimeError(f"random words were given for {count} samples, and the forward pass has {samples}")


class SampleDropout(nn.Dropout):
    """Drop single elements of [n, ...]."""

    def __init__(self, rate: float, *, words: SampleWords, name: str) -> None:
        super().__init__(rate)
        self.words, self._given = words, words.add(name)

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        if not self.training or not self.p:
            return input
        given, shape = self._given, input.shape[1:]
        _check_count(given, input)
        words = given.factor, given.summand, *_kept(self.p)
        if torch.compiler.is_compiling():  # compute T inline: a few integer operations, no memory
            return _drop_at_once(input, table_of(shape, step=self.words.step), *words)
        return _Dropped.apply(input, self.words.table(shape), *words)


class SampleDropPath(DropPath):
    """Drop a residual branch [n, ...] for whole samples."""

    def __init__(self, rate: float, *, words: SampleWords, name: str) -> None:
        super().__init__(rate)
        self.words, self._given = words, words.add(name, rate=rate)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        given = self._given
        _check_count(given, x)
        # The site's number must not become part of a compiled graph.
        compiles = torch.compiler.is_compiling()
        branch = given.branch.to(x.dtype) if compiles else self.words.branch(given, dtype=x.dtype)
        return x * branch.view(-1, *[1] * (x.dim() - 1))


class SamplePatchDropout(PatchDropout):
    """Keep equally many patches of each sample's tokens [n, prefix + patches, D], in random order."""

    def __init__(self, rate: float, *, num_prefix_tokens: int, words: SampleWords, name: str) -> None:
        super().__init__(rate, num_prefix_tokens=num_prefix_tokens)
        self.words, self._given = words, words.add(name)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.prob:
            return x
        prefix, patches = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        count = patches.shape[1]
        _check_count(self._given, x)
        factor, summand = self._given.factor, self._given.summand
        table = self.words.table(torch.Size([count]))
        # Bijections, so no two patches of a sample are equal.
        ranks = mix_words(table * factor[:, None] + summand[:, None]).argsort(dim=1)
        stay = ranks[:, : max(1, int(count * (1 - self.prob)))]  # as many as timm's
        return torch.cat([prefix, chosen_tokens(patches, stay)], dim=1)


def by_sample(model: nn.Module) -> None:
    """Replace the modules that draw from the process's generator at a rate above 0. With stochastic depth the first
    block (rate 0, no module in timm) gets one too, so blocks are alike."""
    words = SampleWords()
    deep = any(isinstance(module, DropPath) and module.drop_prob for module in model.modules())
    for name, module in list(model.named_modules()):
        of_site = {"words": words, "name": name}
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
    if words.sites:
        setattr(model, _OF_MODEL, words)


def words_of(model: nn.Module) -> SampleWords | None:
    """Return the words that `by_sample` gave the modules of `model`, or None."""
    return getattr(model, _OF_MODEL, None)


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, factor: Tensor, summand: Tensor, *kept: Any) -> Tensor:
        ctx.save_for_backward(table, factor, summand)
        ctx.kept = kept
        return drop(x, table, factor, summand, *kept)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return drop(gradient, *ctx.saved_tensors, *ctx.kept), *[None] * 5


def _drop_at_once(x: Tensor, table: Tensor, factor: Tensor, summand: Tensor, below: int, scale: float) -> Tensor:
    shape = (-1, *[1] * table.dim())
    return torch.where(table * factor.view(shape) + summand.view(shape) >= below, x * scale, 0)


def _drop_in_pieces(x: Tensor, table: Tensor, factor: Tensor, summand: Tensor, below: int, scale: float) -> Tensor:
    """Up to three times as fast as all samples together, if a piece fits into a CPU's cache and they do not."""
    shape, samples = (-1, *[1] * table.dim()), max(1, _PIECE // max(1, table.numel()))
    factor, summand = factor.view(shape), summand.view(shape)
    if len(x) <= samples:
        return (x * ((table * factor).add_(summand) >= below)).mul_(scale)
    dropped = torch.empty_like(x)
    for piece, into, f, s in zip(*(each.split(samples) for each in (x, dropped, factor, summand)), strict=True):
        torch.mul(piece, (table * f).add_(s) >= below, out=into).mul_(scale)
    return dropped


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


# One operation of [n, ...], with a kernel for each kind of device.
_LIBRARY = torch.library.Library("shardvit", "DEF")
_LIBRARY.define("drop(Tensor x, Tensor table, Tensor factor, Tensor summand, int below, float scale) -> Tensor")
_LIBRARY.impl("drop", _drop_at_once, "CompositeExplicitAutograd")
_LIBRARY.impl("drop", _drop_in_pieces, "CPU")
_LIBRARY.impl("drop", lambda *arguments: _fused()(*arguments), "CUDA")
drop: Callable[..., Tensor] = torch.ops.shardvit.drop.default

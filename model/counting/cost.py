"""Cost of single layers and of ResNets per image: parameters, FLOPs, bytes kept for the backward pass. No torch.

FLOPs are counted as by torch's FlopCounterMode: two per multiplication of a matrix product or convolution, none for the
rest. A layer keeps its input, in bf16; the caller counts shared inputs once. A ResNet's sides are exact multiples of
its strides; the standardised copy of a kernel is left out, as it is kept once a batch.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Literal

from shardvit.model.variants import ResnetSizes
from shardvit.model.vocabulary import Norm

VALUE_BYTES = 2  # bf16
STATISTIC_BYTES = 4  # norms' mean and reciprocal deviation, softmax's log-sum: float32 on the GPU
_ROOT_WIDTH = 64  # at width factor 1 (arXiv 1512.03385, Table 1)
_EXPANSION = 4  # a unit's output channels over its bottleneck's (same table)
_INDEX_BYTES = 8  # max pooling keeps the maximum's place

Norms = Literal["before", "after"]  # each convolution: the pre-activation units of BiT, or the stem's


@dataclass(frozen=True)
class Cost:
    """Parameters, forward FLOPs per image, and bytes kept of it for the backward pass."""

    parameters: int = 0
    flops: int = 0
    saved_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(left + right for left, right in zip(astuple(self), astuple(other), strict=True)))

    def times(self, number: int) -> Cost:
        return Cost(*(value * number for value in astuple(self)))


NOTHING = Cost()


def learned(parameters: int) -> Cost:
    """Parameters added or multiplied element by element: no counted FLOPs."""
    return Cost(parameters=parameters)


def saved(elements: int) -> Cost:
    """A layer without parameters that keeps this many values: GELU its input, ReLU its output."""
    return Cost(saved_bytes=VALUE_BYTES * elements)


def linear(rows: int, fan_in: int, fan_out: int) -> Cost:
    """A Linear with bias: [rows, fan_in] -> [rows, fan_out]."""
    return Cost(
        parameters=fan_in * fan_out + fan_out,
        flops=2 * rows * fan_in * fan_out,
        saved_bytes=VALUE_BYTES * rows * fan_in,
    )


def norm(rows: int, width: int, *, kind: Norm = "layer", groups: int = 1) -> Cost:
    """A LayerNorm of [rows, width], or an RMSNorm, without mean and bias; weights are shared by `groups` of a row."""
    each = 2 if kind == "layer" else 1  # parameters, and statistics
    kept = VALUE_BYTES * rows * width + each * STATISTIC_BYTES * rows * groups
    return Cost(parameters=each * width // groups, saved_bytes=kept)


def fused_attention(queries: int, keys: int, *, width: int, heads: int) -> Cost:
    """Softmax attention keeps q, k, v and a log-sum per query, not the weights; the next Linear keeps its output."""
    saved = VALUE_BYTES * (queries + 2 * keys) * width + STATISTIC_BYTES * heads * queries
    return Cost(flops=2 * 2 * queries * keys * width, saved_bytes=saved)


def convolution(
    size: int, channels_in: int, channels_out: int, *, kernel: int, stride: int = 1, bias: bool = False, copied: int = 0
) -> Cost:
    """A square convolution of [channels_in, size, size]; pads `copied` zeros per axis by a copy, which it keeps."""
    weights = kernel * kernel * channels_in * channels_out
    return Cost(
        parameters=weights + (channels_out if bias else 0),
        flops=2 * weights * (size // stride) ** 2,
        saved_bytes=VALUE_BYTES * channels_in * (size + copied) ** 2,
    )


@dataclass(frozen=True)
class Unit:
    """Bytes that one block keeps."""

    saved_bytes: int  # without activation checkpointing
    input_bytes: int  # with it
    live_bytes: int  # beyond its input, during recomputation


@dataclass(frozen=True)
class Chain:
    """Blocks in sequence and their cost without activation checkpointing."""

    cost: Cost = NOTHING
    units: tuple[Unit, ...] = ()

    def checkpointed_bytes(self, *, every: int) -> int:
        """Peak while the backward pass recomputes every `every`-th unit, starting with the first."""
        before = most = 0
        for number, unit in enumerate(self.units):
            if number % every == 0:
                most = max(most, before + unit.input_bytes + unit.live_bytes)  # later units are freed by then
                before += unit.input_bytes
            else:
                before += unit.saved_bytes
        return max(most, before)

    def then(self, block: Cost, *, input_elements: int, own_output_elements: int = 0, times: int = 1) -> Chain:
        """Append `times` units. A block that keeps its own output holds it twice while it is recomputed."""
        input_bytes = VALUE_BYTES * input_elements
        live_bytes = block.saved_bytes - input_bytes + VALUE_BYTES * own_output_elements
        units = (Unit(block.saved_bytes, input_bytes, live_bytes),) * times
        return Chain(self.cost + block.times(times), self.units + units)


@dataclass(frozen=True)
class ResnetCost:
    """A ResNet without head; its features are [channels, size, size]."""

    first: Cost  # the first convolution
    ends: Cost  # everything outside the units, `first` included
    units: Chain
    channels: int
    size: int


def stem_cost(layers: tuple[int, ...], *, width_factor: int, image_size: int, image_channels: int = 3) -> ResnetCost:
    """A hybrid's stem. Strides of 2 pad by a copy; each ReLU's output is counted where it goes."""
    width, size = _ROOT_WIDTH * width_factor, image_size // 2
    first = convolution(image_size, image_channels, width, kernel=7, stride=2, copied=5)
    root = first + _group_norm(size, width) + saved(width * size**2) + _max_pool(size, width, copied=1)
    units, channels, size = _stages(layers, width=width, size=size // 2, norms="after")
    return ResnetCost(first, root, units, channels, size)


def resnet_cost(sizes: ResnetSizes, *, image_size: int, image_channels: int = 3) -> ResnetCost:
    """A pure ResNet: a norm and a ReLU follow the last unit."""
    width, size = _ROOT_WIDTH * sizes.width_factor, image_size // 2
    first = convolution(image_size, image_channels, width, kernel=7, stride=2)
    root = first + _max_pool(size, width, copied=2)
    units, channels, size = _stages(sizes.layers, width=width, size=size // 2, norms="before")
    return ResnetCost(first, root + _group_norm(size, channels) + saved(channels * size**2), units, channels, size)


def _stages(layers: tuple[int, ...], *, width: int, size: int, norms: Norms) -> tuple[Chain, int, int]:
    """The units of all stages, and the output's channels and side."""
    chain, channels = Chain(), width
    for stage, units in enumerate(layers):
        for unit in range(units):
            stride = 2 if stage > 0 and unit == 0 else 1
            bottleneck = width * 2**stage
            cost = _unit(size, channels, bottleneck, stride=stride, projected=unit == 0, norms=norms)
            input_elements = channels * size**2
            channels, size = _EXPANSION * bottleneck, size // stride
            relu = channels * size**2 if norms == "after" else 0  # the last one's output is the unit's
            chain = chain.then(cost, input_elements=input_elements, own_output_elements=relu)
    return chain, channels, size


def _unit(size: int, channels: int, bottleneck: int, *, stride: int, projected: bool, norms: Norms) -> Cost:
    """Convolutions 1x1, 3x3 (with the stride) and 1x1, and the shortcut's projection, if any."""
    out, out_size = _EXPANSION * bottleneck, size // stride
    copied = norms == "after" and stride > 1
    cost = (
        convolution(size, channels, bottleneck, kernel=1)
        + _group_norm(size, bottleneck)
        + convolution(size, bottleneck, bottleneck, kernel=3, stride=stride, copied=int(copied))
        + saved(bottleneck * size**2 if copied else 0)  # the ReLU's output; the convolution keeps the copy
        + _group_norm(out_size, bottleneck)
        + convolution(out_size, bottleneck, out, kernel=1)
        + (_group_norm(size, channels) if norms == "before" else _group_norm(out_size, out))
    )
    if not projected:
        return cost
    projection = convolution(size, channels, out, kernel=1, stride=stride)
    shared = Cost(parameters=projection.parameters, flops=projection.flops)  # shares the first convolution's input
    return cost + shared + (_group_norm(out_size, out) if norms == "after" else Cost())


def _group_norm(size: int, channels: int) -> Cost:
    """A GroupNorm of [channels, size, size], without the few statistics of its 32 groups."""
    return Cost(parameters=2 * channels, saved_bytes=VALUE_BYTES * channels * size * size)


def _max_pool(size: int, channels: int, *, copied: int) -> Cost:
    """3x3 with stride 2 on [channels, size, size], with zeros in a copy (see `convolution`)."""
    indices = Cost(saved_bytes=_INDEX_BYTES * channels * (size // 2) ** 2)
    return saved(channels * (size + copied) ** 2) + indices

"""Cost of a ResNet per image: the hybrids' stem and the pure ResNets of `model.resnet`. No torch.

Sides are exact multiples of the strides. A kernel's standardised copy is left out: it is kept once a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from model.counting.cost import VALUE_BYTES, Chain, Cost, convolution, kept
from model.variants import ResnetSizes

_ROOT_WIDTH = 64  # of width factor 1 (arXiv 1512.03385, Table 1)
_EXPANSION = 4  # a unit's outputs to its bottleneck's (the same)
_INDEX_BYTES = 8  # max pooling keeps where the maximum was

Norms = Literal["before", "after"]  # each convolution: the pre-activation units of BiT, or the stem's


@dataclass(frozen=True)
class ResnetCost:
    """A ResNet without a head; its features are [channels, size, size]."""

    first: Cost  # the convolution that sees the pixels
    ends: Cost  # all that is in no unit, `first` included
    units: Chain
    channels: int
    size: int


def stem_cost(layers: tuple[int, ...], *, width_factor: int, image_size: int) -> ResnetCost:
    """A hybrid's stem. Strides of 2 pad by a copy; each ReLU's output is counted where it goes."""
    width, size = _ROOT_WIDTH * width_factor, image_size // 2
    first = convolution(image_size, 3, width, kernel=7, stride=2, copied=5)
    root = first + _group_norm(size, width) + kept(width * size**2) + _max_pool(size, width, copied=1)
    units, channels, size = _stages(layers, width=width, size=size // 2, norms="after")
    return ResnetCost(first, root, units, channels, size)


def resnet_cost(sizes: ResnetSizes, *, image_size: int) -> ResnetCost:
    """A pure ResNet: a norm and a ReLU come after the last unit."""
    width, size = _ROOT_WIDTH * sizes.width_factor, image_size // 2
    first = convolution(image_size, 3, width, kernel=7, stride=2)
    root = first + _max_pool(size, width, copied=2)
    units, channels, size = _stages(sizes.layers, width=width, size=size // 2, norms="before")
    return ResnetCost(first, root + _group_norm(size, channels) + kept(channels * size**2), units, channels, size)


def _stages(layers: tuple[int, ...], *, width: int, size: int, norms: Norms) -> tuple[Chain, int, int]:
    """The units of all stages, and the channels and the side of what comes out."""
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
    """Convolutions 1x1, 3x3 (with the stride) and 1x1, and the projection of the shortcut where there is one."""
    out, out_size = _EXPANSION * bottleneck, size // stride
    copied = norms == "after" and stride > 1
    cost = (
        convolution(size, channels, bottleneck, kernel=1)
        + _group_norm(size, bottleneck)
        + convolution(size, bottleneck, bottleneck, kernel=3, stride=stride, copied=int(copied))
        + kept(bottleneck * size**2 if copied else 0)  # the ReLU's output, of which the convolution has the copy
        + _group_norm(out_size, bottleneck)
        + convolution(out_size, bottleneck, out, kernel=1)
        + (_group_norm(size, channels) if norms == "before" else _group_norm(out_size, out))
    )
    if not projected:
        return cost
    projection = convolution(size, channels, out, kernel=1, stride=stride)
    shared = Cost(parameters=projection.parameters, flops=projection.flops)  # its input is the first convolution's
    return cost + shared + (_group_norm(out_size, out) if norms == "after" else Cost())


def _group_norm(size: int, channels: int) -> Cost:
    """A GroupNorm of [channels, size, size]; the few statistics of its 32 groups are left out."""
    return Cost(parameters=2 * channels, saved_bytes=VALUE_BYTES * channels * size * size)


def _max_pool(size: int, channels: int, *, copied: int) -> Cost:
    """3x3 with stride 2 on [channels, size, size], with zeros in a copy (see `model.counting.cost.convolution`)."""
    indices = Cost(saved_bytes=_INDEX_BYTES * channels * (size // 2) ** 2)
    return kept(channels * (size + copied) ** 2) + indices

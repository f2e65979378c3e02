"""Cost of single layers per image: parameters, FLOPs, and bytes kept for the backward pass. No torch.

FLOPs are counted as torch's FlopCounterMode does: two for each multiplication of a matrix product or convolution, none
for anything else. A layer keeps its input, in bf16; what two layers share is counted once, by the caller.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

VALUE_BYTES = 2  # bf16
STATISTIC_BYTES = 4  # a norm's mean and reciprocal deviation, softmax's log-sum: float32 on the GPU


@dataclass(frozen=True)
class Cost:
    """Learnt parameters, forward FLOPs of one image, and the bytes kept of it until the backward pass."""

    parameters: int = 0
    flops: int = 0
    saved_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(left + right for left, right in zip(astuple(self), astuple(other), strict=True)))

    def times(self, number: int) -> Cost:
        return Cost(*(value * number for value in astuple(self)))


NOTHING = Cost()


def learnt(parameters: int) -> Cost:
    """Parameters that are added or multiplied, element by element: no counted arithmetic."""
    return Cost(parameters=parameters)


def kept(elements: int) -> Cost:
    """A layer without parameters that keeps this many numbers: GELU its input, ReLU its output."""
    return Cost(saved_bytes=VALUE_BYTES * elements)


def linear(rows: int, fan_in: int, fan_out: int) -> Cost:
    """A Linear with bias: [rows, fan_in] -> [rows, fan_out]."""
    return Cost(
        parameters=fan_in * fan_out + fan_out,
        flops=2 * rows * fan_in * fan_out,
        saved_bytes=VALUE_BYTES * rows * fan_in,
    )


def layer_norm(rows: int, width: int) -> Cost:
    """A LayerNorm of [rows, width]."""
    return Cost(parameters=2 * width, saved_bytes=VALUE_BYTES * rows * width + 2 * STATISTIC_BYTES * rows)


def fused_attention(queries: int, keys: int, *, width: int, heads: int) -> Cost:
    """Softmax attention that keeps q, k, v and a log-sum per query, never the [queries, keys] weights; its output is
    kept by the Linear that follows."""
    saved = VALUE_BYTES * (queries + 2 * keys) * width + STATISTIC_BYTES * heads * queries
    return Cost(flops=2 * 2 * queries * keys * width, saved_bytes=saved)


def convolution(
    size: int, channels_in: int, channels_out: int, *, kernel: int, stride: int = 1, bias: bool = False, copied: int = 0
) -> Cost:
    """A convolution of [channels_in, size, size] with square kernels, to size / stride a side. `copied` zeros along
    each axis are added by a copy, which is then what is kept."""
    weights = kernel * kernel * channels_in * channels_out
    return Cost(
        parameters=weights + (channels_out if bias else 0),
        flops=2 * weights * (size // stride) ** 2,
        saved_bytes=VALUE_BYTES * channels_in * (size + copied) ** 2,
    )


@dataclass(frozen=True)
class Unit:
    """Bytes that one block of a chain keeps."""

    saved_bytes: int  # without activation checkpointing
    input_bytes: int  # with it
    live_bytes: int  # beyond its input, while it is recomputed


@dataclass(frozen=True)
class Chain:
    """Blocks one after the other, and what they cost without activation checkpointing."""

    cost: Cost = NOTHING
    units: tuple[Unit, ...] = ()

    def checkpointed_bytes(self, *, every: int) -> int:
        """The most kept at once, while the backward pass recomputes each `every`-th unit, the first among them."""
        before = most = 0
        for number, unit in enumerate(self.units):
            if number % every == 0:
                most = max(most, before + unit.input_bytes + unit.live_bytes)  # the later ones' are freed by then
                before += unit.input_bytes
            else:
                before += unit.saved_bytes
        return max(most, before)

    def then(self, block: Cost, *, input_elements: int, own_output_elements: int = 0, times: int = 1) -> Chain:
        """The chain with `times` units more. `own_output_elements`: of an output that the block itself keeps, counted
        as the next one's input; recomputed, it is a second copy."""
        input_bytes = VALUE_BYTES * input_elements
        return Chain(
            self.cost + block.times(times),
            self.units
            + (
                Unit(
                    block.saved_bytes, input_bytes, block.saved_bytes - input_bytes + VALUE_BYTES * own_output_elements
                ),
            )
            * times,
        )

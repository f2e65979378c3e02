"""How flax orders the axes of an array, and torch those of the same parameter: views only, nothing is copied.

flax multiplies from the right, so kernels are (in, out), convolutions HWIO, and attention keeps its heads as an axis
of their own: (D, heads, d) into them, (heads, d, D) out of them. Shapes alone work without torch. One matrix at a
time: timm's fused q/k/v is taken apart before it comes here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Axes = Literal["same", "conv", "dense", "to_heads", "to_heads_bias", "from_heads"]
Shape = tuple[int, ...]


def google_shape(axes: Axes, shape: Shape, *, heads: int) -> Shape:
    """The shape of the array that holds a parameter of ours of this shape."""
    match axes:
        case "same":
            return shape
        case "conv":
            outputs, inputs, height, width = shape
            return (height, width, inputs, outputs)
        case "dense":
            return (shape[1], shape[0])
        case "to_heads":
            return (shape[1], heads, shape[0] // heads)
        case "to_heads_bias":
            return (heads, shape[0] // heads)
        case "from_heads":
            return (heads, shape[1] // heads, shape[0])


def our_shape(axes: Axes, shape: Shape) -> Shape | None:
    """The other way round; None: an array of this shape has not these axes."""
    match axes, shape:
        case "same", _:
            return shape
        case "conv", (height, width, inputs, outputs):
            return (outputs, inputs, height, width)
        case "dense", (inputs, outputs):
            return (outputs, inputs)
        case "to_heads", (inputs, heads, head_dim):
            return (heads * head_dim, inputs)
        case "to_heads_bias", (heads, head_dim):
            return (heads * head_dim,)
        case "from_heads", (heads, head_dim, outputs):
            return (outputs, heads * head_dim)
        case _:
            return None


def from_google(axes: Axes, value: Tensor) -> Tensor:
    """An array of theirs, as a tensor in its own order, in ours."""
    match axes:
        case "same":
            return value
        case "conv":
            return value.permute(3, 2, 0, 1)
        case "dense":
            return value.t()
        case "to_heads":
            return value.flatten(1).t()
        case "to_heads_bias":
            return value.flatten()
        case "from_heads":
            return value.flatten(0, 1).t()


def to_google(axes: Axes, value: Tensor, *, heads: int) -> Tensor:
    """A parameter of ours in their order."""
    match axes:
        case "same":
            return value
        case "conv":
            return value.permute(2, 3, 1, 0)
        case "dense":
            return value.t()
        case "to_heads":
            return value.t().unflatten(1, (heads, -1))
        case "to_heads_bias":
            return value.unflatten(0, (heads, -1))
        case "from_heads":
            return value.t().unflatten(0, (heads, -1))

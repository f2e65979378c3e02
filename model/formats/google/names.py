"""Map arrays of Google's npz files to our parameters and their order of axes. Reads no file.

Names by google-research/vision_transformer (`models_vit.py`, `models_resnet.py`; its released files number a block's
parts by position, as flax did before linen) and google-research/big_vision (`models/vit.py`; by class). What neither
has (layer scale, other positions than a learned or fixed embedding at the stem) has no name here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from einops import rearrange

if TYPE_CHECKING:
    from torch import Tensor

Axes = Literal["same", "conv", "dense", "to_heads", "to_heads_bias", "from_heads"]
Numbering = Literal["pre_linen", "linen"]

PREFIXES = ("", "opt/target/", "params/", "target/")
PATCH_KERNEL, FINAL_SCALE = "embedding/kernel", "Transformer/encoder_norm/scale"  # what every file has
STACKED = "Transformer/encoderblock/"  # big_vision's scan: all blocks in one array, depth first
# vision_transformer's, big_vision's, and big_vision's of before 2022.
_POSITIONS = ("Transformer/posembed_input/pos_embedding", "pos_embedding", "Transformer/pos_embedding")
_PARTS: dict[Numbering, dict[str, str]] = {
    "pre_linen": {
        "norm1": "LayerNorm_0",
        "attn": "MultiHeadDotProductAttention_1",
        "norm2": "LayerNorm_2",
        "mlp": "MlpBlock_3",
    },
    "linen": {
        "norm1": "LayerNorm_0",
        "attn": "MultiHeadDotProductAttention_0",
        "norm2": "LayerNorm_1",
        "mlp": "MlpBlock_0",
    },
}
# flax's order of axes and torch's: flax multiplies from the right, and attention has an axis of heads. One matrix at a
# time: timm's fused q/k/v is taken apart before.
_ORDERS: dict[Axes, tuple[str, str]] = {
    "same": ("...", "..."),
    "conv": ("height width inputs outputs", "outputs inputs height width"),
    "dense": ("inputs outputs", "outputs inputs"),
    "to_heads": ("inputs heads size", "(heads size) inputs"),
    "to_heads_bias": ("heads size", "(heads size)"),
    "from_heads": ("heads size outputs", "outputs (heads size)"),
}


@dataclass(frozen=True)
class NpzLayout:
    """Array names of one code base."""

    prefix: str  # of all weights; the rest is the optimiser's
    numbering: Numbering  # of a block's parts
    position: str | None  # the array of position embeddings, without the prefix, if there is one
    stacked: bool = False  # all blocks in one array

    @property
    def code_base(self) -> str:
        return "vision_transformer" if self.position == _POSITIONS[0] else "big_vision"

    def part(self, which: Literal["norm1", "attn", "norm2", "mlp"]) -> str:
        return _PARTS[self.numbering][which]

    def block(self, index: int) -> str:
        return STACKED if self.stacked else f"Transformer/encoderblock_{index}/"


VISION_TRANSFORMER = NpzLayout("", "pre_linen", _POSITIONS[0])
BIG_VISION = NpzLayout("params/", "linen", _POSITIONS[1])


@dataclass(frozen=True)
class ArrayPart:
    """`part` of `parts` equal ones along the first axis of our `parameter`, in an array of the file, in order `axes`;
    at index `layer` of its first axis if blocks are stacked."""

    array: str
    parameter: str
    axes: Axes
    part: int = 0
    parts: int = 1
    layer: int | None = None


def from_google(axes: Axes, value: Tensor) -> Tensor:
    """An array of theirs in our order; raises RuntimeError if it has another number of axes."""
    theirs, ours = _ORDERS[axes]
    return rearrange(value, f"{theirs} -> {ours}")


def to_google(axes: Axes, value: Tensor, *, heads: int) -> Tensor:
    """A parameter of ours in their order."""
    theirs, ours = _ORDERS[axes]
    return rearrange(value, f"{ours} -> {theirs}", **({"heads": heads} if "heads" in theirs else {}))


def find_layout(names: Collection[str]) -> NpzLayout | None:
    """The layout of a file with these arrays; None: it is no Vision Transformer of Google's."""
    for prefix in PREFIXES:
        if f"{prefix}{PATCH_KERNEL}" in names and f"{prefix}{FINAL_SCALE}" in names:
            position = next((name for name in _POSITIONS if f"{prefix}{name}" in names), None)
            old = any(name.startswith(f"{prefix}Transformer/") and "/MlpBlock_3/" in name for name in names)
            stacked = any(name.startswith(f"{prefix}{STACKED}") for name in names)
            return NpzLayout(prefix, "pre_linen" if old else "linen", position, stacked)
    return None


def slots_of(parameters: Iterable[str], *, layout: NpzLayout) -> list[ArrayPart]:
    """Locate all of our parameters, in their order; raises ValueError if one has no name in this layout."""
    slots: list[ArrayPart] = []
    for parameter in parameters:
        path = parameter.split(".")
        found = _arrays(path, layout=layout)
        if not found:
            raise ValueError(f"Google's {layout.code_base} names have no place for {parameter!r}")
        layer = int(path[1]) if layout.stacked and path[0] == "blocks" else None
        slots += [
            ArrayPart(layout.prefix + array, parameter, axes, part, len(found), layer)
            for part, (array, axes) in enumerate(found)
        ]
    return slots


def _arrays(path: list[str], *, layout: NpzLayout) -> list[tuple[str, Axes]]:
    """The arrays, without the prefix, that make one of our parameters, in order; none: it has no place."""
    match path:
        case ["cls_token"]:
            return [("cls", "same")]
        case ["pos_embed"] if layout.position is not None:
            return [(layout.position, "same")]
        case ["patch_embed", "proj", leaf]:
            return [_weighed("embedding", leaf, "conv")]
        case ["patch_embed", "backbone", "stem", part, leaf]:
            return [_of_resnet("", f"{part}_root", leaf)]
        case ["patch_embed", "backbone", "stages", stage, "blocks", unit, "downsample", part, leaf]:
            return [_of_resnet(f"block{int(stage) + 1}/unit{int(unit) + 1}/", f"{part}_proj", leaf)]
        case ["patch_embed", "backbone", "stages", stage, "blocks", unit, part, leaf]:
            return [_of_resnet(f"block{int(stage) + 1}/unit{int(unit) + 1}/", part, leaf)]
        case ["blocks", index, ("norm1" | "norm2") as part, leaf]:
            return [_normed(layout.block(int(index)) + layout.part(part), leaf)]
        case ["blocks", index, "attn", which, leaf]:
            return _attention(layout.block(int(index)) + layout.part("attn"), which, leaf)
        case ["blocks", index, "mlp", which, leaf]:
            return [_mlp(layout.block(int(index)) + layout.part("mlp"), which, leaf)]
        case ["norm", leaf]:
            return [_normed("Transformer/encoder_norm", leaf)]
        case ["attn_pool", "latent"]:
            return [("MAPHead_0/probe", "same")]
        case ["attn_pool", "norm", leaf]:
            return [_normed("MAPHead_0/LayerNorm_0", leaf)]
        case ["attn_pool", "mlp", which, leaf]:
            return [_mlp("MAPHead_0/MlpBlock_0", which, leaf)]
        case ["attn_pool", which, leaf]:
            return _attention("MAPHead_0/MultiHeadDotProductAttention_0", which, leaf)
        case ["head", leaf] | ["head", "logits", leaf]:
            return [_weighed("head", leaf, "dense")]
        case ["head", "pre_logits", leaf]:
            return [_weighed("pre_logits", leaf, "dense")]
        case _:
            return []


def _weighed(module: str, leaf: str, axes: Axes) -> tuple[str, Axes]:
    if leaf == "weight":
        return f"{module}/kernel", axes
    return f"{module}/bias", "to_heads_bias" if axes == "to_heads" else "same"


def _normed(module: str, leaf: str) -> tuple[str, Axes]:
    return f"{module}/{'scale' if leaf == 'weight' else 'bias'}", "same"


def _attention(module: str, which: str, leaf: str) -> list[tuple[str, Axes]]:
    if which == "proj":
        return [_weighed(f"{module}/out", leaf, "from_heads")]
    letters = {"q": "query", "k": "key", "v": "value"}  # of timm's q, kv and qkv
    return [_weighed(f"{module}/{letters[letter]}", leaf, "to_heads") for letter in which if letter in letters]


def _mlp(module: str, which: str, leaf: str) -> tuple[str, Axes]:
    return _weighed(f"{module}/{'Dense_0' if which == 'fc1' else 'Dense_1'}", leaf, "dense")


def _of_resnet(unit: str, part: str, leaf: str) -> tuple[str, Axes]:
    """`part` is conv1, norm1, conv_root and so on."""
    if part.startswith("conv"):
        return f"{unit}{part}/kernel", "conv"
    return _normed(f"{unit}{part.replace('norm', 'gn')}", leaf)

"""Names, axes and sizes of Google's npz arrays: map them to our parameters, and infer the model from them.

Names are those of google-research/vision_transformer (`models_vit.py`, `models_resnet.py`; released files number a
block's parts by position, as flax did before linen) and google-research/big_vision (`models/vit.py`; by class). Layer
scale and positions other than a learned or fixed embedding at the stem have no name here. Files carry no configuration:
sizes come from shapes, the rest is common to both (tanh GELU, epsilon 1e-6, their interpolation).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from einops import rearrange

from shardvit.model.formats.external_model import NO_HINTS, ExternalModel, Semantics, UserHints, config_of, lost_blocks
from shardvit.model.saved.state_shapes import Shape, read_sizes
from shardvit.model.vocabulary import HeadKind

if TYPE_CHECKING:
    from torch import Tensor

Axes = Literal["same", "conv", "dense", "to_heads", "to_heads_bias", "from_heads"]

PREFIXES = ("", "opt/target/", "params/", "target/")
PATCH_KERNEL, FINAL_SCALE = "embedding/kernel", "Transformer/encoder_norm/scale"  # in every file
STACKED = "Transformer/encoderblock/"  # big_vision's scan: all blocks in one array, depth first
USUAL_IMAGE_SIZE = 224  # pixels; pre-training in both code bases
# vision_transformer's, big_vision's, and big_vision's before 2022.
_POSITIONS = ("Transformer/posembed_input/pos_embedding", "pos_embedding", "Transformer/pos_embedding")
# A block's parts, before linen and in linen.
_PARTS = {
    "norm1": ("LayerNorm_0", "LayerNorm_0"),
    "attn": ("MultiHeadDotProductAttention_1", "MultiHeadDotProductAttention_0"),
    "norm2": ("LayerNorm_2", "LayerNorm_1"),
    "mlp": ("MlpBlock_3", "MlpBlock_0"),
}
# flax's axes and torch's: flax multiplies from the right, and attention has an axis of heads. One matrix each: timm's
# fused q/k/v is split first.
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

    prefix: str  # all weights'; the rest is the optimiser's
    before_linen: bool  # numbering of a block's parts
    position: str | None  # array of position embeddings, without the prefix
    stacked: bool = False  # all blocks in one array

    @property
    def code_base(self) -> str:
        return "vision_transformer" if self.position == _POSITIONS[0] else "big_vision"

    def part(self, block: int, which: str) -> str:  # which: norm1, attn, norm2 or mlp
        before = STACKED if self.stacked else f"Transformer/encoderblock_{block}/"
        return before + _PARTS[which][not self.before_linen]


VISION_TRANSFORMER = NpzLayout("", True, _POSITIONS[0])
BIG_VISION = NpzLayout("params/", False, _POSITIONS[1])


@dataclass(frozen=True)
class ArrayPart:
    """Maps slice `part` of `parts` of our `parameter` (first axis) to `array`, with `axes`; `layer` if stacked."""

    array: str
    parameter: str
    axes: Axes
    part: int = 0
    parts: int = 1
    layer: int | None = None


def from_google(axes: Axes, value: Tensor) -> Tensor:
    """Permute an array to our axes; RuntimeError for another number of axes."""
    theirs, ours = _ORDERS[axes]
    return rearrange(value, f"{theirs} -> {ours}")


def to_google(axes: Axes, value: Tensor, *, heads: int) -> Tensor:
    """Permute our parameter to their axes."""
    theirs, ours = _ORDERS[axes]
    return rearrange(value, f"{ours} -> {theirs}", **({"heads": heads} if "heads" in theirs else {}))


def find_layout(names: Collection[str]) -> NpzLayout | None:
    """Find a file's layout by its arrays; None if it is no Google ViT."""
    for prefix in PREFIXES:
        if f"{prefix}{PATCH_KERNEL}" in names and f"{prefix}{FINAL_SCALE}" in names:
            position = next((name for name in _POSITIONS if f"{prefix}{name}" in names), None)
            old = any(name.startswith(f"{prefix}Transformer/") and "/MlpBlock_3/" in name for name in names)
            stacked = any(name.startswith(f"{prefix}{STACKED}") for name in names)
            return NpzLayout(prefix, old, position, stacked)
    return None


def slots_of(parameters: Iterable[str], *, layout: NpzLayout) -> list[ArrayPart]:
    """Locate all of our parameters, in their order; ValueError if one has no name in this layout."""
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
    """Arrays (without prefix), in order, that make up one of our parameters; empty if unknown."""
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
            return [_normed(layout.part(int(index), part), leaf)]
        case ["blocks", index, "attn", which, leaf]:
            return _attention(layout.part(int(index), "attn"), which, leaf)
        case ["blocks", index, "mlp", which, leaf]:
            return [_mlp(layout.part(int(index), "mlp"), which, leaf)]
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
    letters = {"q": "query", "k": "key", "v": "value"}  # in timm's q, kv and qkv
    return [_weighed(f"{module}/{letters[letter]}", leaf, "to_heads") for letter in which if letter in letters]


def _mlp(module: str, which: str, leaf: str) -> tuple[str, Axes]:
    return _weighed(f"{module}/{'Dense_0' if which == 'fc1' else 'Dense_1'}", leaf, "dense")


def _of_resnet(unit: str, part: str, leaf: str) -> tuple[str, Axes]:
    if part.startswith("conv"):
        return f"{unit}{part}/kernel", "conv"
    return _normed(f"{unit}{part.replace('norm', 'gn')}", leaf)


def infer_model(shapes: Mapping[str, Shape], *, layout: NpzLayout, hints: UserHints = NO_HINTS) -> ExternalModel:
    """Infer the model, still without weights, from its arrays' shapes, named without the prefix. ValueError if an array
    that fixes a size is missing or impossible, or blocks or positions seem missing and `hints` does not confirm it."""
    height, side, channels, width = _axes(shapes, PATCH_KERNEL, count=4)
    attention = _axes(shapes, f"{layout.part(0, 'attn')}/query/kernel", count=3 + layout.stacked)
    mlp = _axes(shapes, f"{layout.part(0, 'mlp')}/Dense_0/kernel", count=2 + layout.stacked)
    heads, head_dim = attention[-2:]
    if heads * head_dim != width:
        raise ValueError(f"{heads} attention heads of {head_dim} do not make tokens of {width}")
    if not (layout.position or hints.position):
        raise ValueError(
            "it has no position embeddings: it is incomplete; if it is one of big_vision's with fixed ones, give "
            "--position sincos_2d (or none, for a model without any)"
        )
    blocks = {match[1] for name in shapes if (match := re.match(r"Transformer/encoderblock_(\d+)/", name))}
    depth = attention[0] if layout.stacked else len(blocks)
    ours = {
        "patch_embed.proj.weight": (width, channels, height, side),
        "blocks.0.mlp.fc1.weight": (mlp[-1], width),
        "blocks.0.norm1.bias": (width,),  # no RMSNorm
        f"blocks.{depth - 1}.norm1.weight": (width,),
        "norm.weight": (width,),
    } | _stem(shapes)
    for theirs, name in (("cls", "cls_token"), ("MAPHead_0/probe", "attn_pool.latent")):
        if theirs in shapes:
            ours[name] = shapes[theirs]
    if layout.position:
        ours["pos_embed"] = _axes(shapes, layout.position, count=3)
    if "head/kernel" in shapes:
        ours["head.weight"] = _axes(shapes, "head/kernel", count=2)[::-1]
    sizes = read_sizes(ours, origin="it")
    semantics = Semantics("tanh", 1e-6, "google", heads=heads, position=None if layout.position else hints.position)
    config, notes = config_of(sizes, semantics=semantics, given=None, origin="it")
    if hints.depth is None and (lost := lost_blocks(config.sizes)):
        raise ValueError(f"it {lost}")
    grid_size = sizes.grid_size
    if grid_size is None:
        grid_size = max(1, USUAL_IMAGE_SIZE // sizes.trunk.patch_size)
        notes += (
            f"The file has no position embeddings ({hints.position}), which tell the resolution: taken as the usual "
            f"one, {grid_size * sizes.trunk.patch_size} pixels.",
        )
    head, problem = _head(shapes, width=width, num_classes=sizes.num_classes)
    if problem:
        notes += (f"The file {problem}: the layer and what follows it are left out.",)
    return ExternalModel(
        format=f"Google's npz ({layout.code_base})",
        state={},
        config=config,
        image_size=grid_size * sizes.trunk.patch_size,
        num_classes=0 if problem else sizes.num_classes,
        head=head,
        eval_protocol="vit" if layout.code_base == "vision_transformer" else "big_vision",
        headless=problem or "has no head",
        notes=notes,
    )


def _head(shapes: Mapping[str, Shape], *, width: int, num_classes: int) -> tuple[HeadKind, str]:
    """Kind of head, and why it must be left out, or ""."""
    if "pre_logits/kernel" not in shapes:
        return "linear", ""
    representation = _axes(shapes, "pre_logits/kernel", count=2)[1]
    if num_classes == 0:
        return "linear", "has a representation layer and no head behind it"
    if representation == width:
        return "mlp", ""
    problem = f"has a representation layer of {representation} beside tokens of {width}, which no head of ours has"
    return "linear", problem


def _axes(shapes: Mapping[str, Shape], name: str, *, count: int) -> Shape:
    if name not in shapes:
        raise ValueError(f"the array {name!r} is missing, which fixes a size of the model")
    shape = shapes[name]
    if len(shape) != count or min(shape) < 1:
        raise ValueError(f"the array {name!r} has the shape {shape}, but should have {count} axes")
    return shape


def _stem(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    if "conv_root/kernel" not in shapes:
        return {}
    side, _, of_image, channels = _axes(shapes, "conv_root/kernel", count=4)
    if channels % 64:
        raise ValueError(f"its ResNet stem has {channels} channels at the root: only multiples of 64 are supported")
    units = [match for name in shapes if (match := re.match(r"block(\d+)/unit(\d+)/", name))]
    stem = {f"patch_embed.backbone.stages.{int(unit[1]) - 1}.blocks.{int(unit[2]) - 1}.conv1": () for unit in units}
    return stem | {"patch_embed.backbone.stem.conv.weight": (channels, of_image, side, side)}

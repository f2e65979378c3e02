"""The model in one of Google's npz files, from the shapes of its arrays: the files carry no configuration.

Costs nothing: shapes only, no tensor, no torch. It reads just the arrays that fix a size; whether all the others fit is
asked afterwards, of the model that this describes (`npz`). What no shape tells is what both code bases always do
(tanh GELU, epsilon 1e-6, their interpolation), except the resolution of a model without learned positions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from model.config import ModelConfig, resnet_stride
from model.formats.foreign import NOTHING_SAID, Said, lost_blocks
from model.formats.google.axes import Shape
from model.formats.google.names import PATCH_KERNEL, Layout
from model.variants import HYBRIDS, VARIANTS
from model.vocabulary import HeadKind

USUAL_IMAGE_SIZE = 224  # pixels; of pre-training in both code bases' configurations


@dataclass(frozen=True)
class Inferred:
    """A model: the trunk, side of its images in pixels, outputs (0: no head) and kind of its head; what was assumed."""

    config: ModelConfig
    image_size: int
    num_classes: int
    head: HeadKind
    notes: tuple[str, ...]
    headless: str = "has no head"


def infer_model(shapes: Mapping[str, Shape], *, layout: Layout, said: Said = NOTHING_SAID) -> Inferred:
    """The model whose arrays, named without the prefix, have these shapes.

    A head whose representation layer has another width than the trunk, or that lacks its last layer, is left out.

    Raises:
        ValueError: an array that fixes a size is missing or has an impossible shape; blocks or position embeddings are
            probably missing, and the user does not say that this is as it should be.
    """
    patch_height, patch_width, _, width = _axes(shapes, PATCH_KERNEL, count=4)
    if patch_height != patch_width:
        raise ValueError(
            f"its patches are {patch_height} x {patch_width} (array {PATCH_KERNEL!r}); only square ones are supported"
        )
    block = layout.block(0)
    attention = _axes(shapes, f"{block}{layout.part('attn')}/query/kernel", count=3 + layout.stacked)
    mlp = _axes(shapes, f"{block}{layout.part('mlp')}/Dense_0/kernel", count=2 + layout.stacked)
    heads, mlp_dim = attention[-2], mlp[-1]
    if heads * attention[-1] != width:
        raise ValueError(f"{heads} attention heads of {attention[-1]} do not make tokens of {width}")
    sizes: dict[str, Any] = {
        "width": width,
        "depth": attention[0] if layout.stacked else _count(shapes, r"Transformer/encoderblock_(\d+)/"),
        "heads": heads,
        "mlp_dim": mlp_dim,
        "patch_size": patch_height,
    } | _resnet(shapes, patch_height)
    notes: list[str] = []
    pool = "cls" if "cls" in shapes else "map" if "MAPHead_0/probe" in shapes else "gap"
    position = "learned_1d" if layout.position else said.position
    if position is None:
        raise ValueError(
            "it has no position embeddings: it is incomplete; if it is one of big_vision's with fixed ones, give "
            "--position sincos_2d (or none, for a model without any)"
        )
    config = ModelConfig.model_validate(_named(sizes) | {"pool": pool, "position": position})
    if said.depth is None and (lost := lost_blocks(config.sizes)):
        raise ValueError(f"it {lost}")
    patch_size: int = sizes["patch_size"]
    if layout.position:
        image_size = patch_size * _side(_axes(shapes, layout.position, count=3)[1], has_class_token=pool == "cls")
    else:
        image_size = max(1, USUAL_IMAGE_SIZE // patch_size) * patch_size
        notes.append(
            f"The file has no position embeddings ({position}), which tell the resolution: taken as the usual one, "
            f"{image_size} pixels."
        )
    num_classes = _axes(shapes, "head/kernel", count=2)[1] if "head/kernel" in shapes else 0
    if "pre_logits/kernel" not in shapes:
        return Inferred(config, image_size, num_classes, "linear", tuple(notes))
    representation = _axes(shapes, "pre_logits/kernel", count=2)[1]
    if num_classes and representation == width:
        return Inferred(config, image_size, num_classes, "mlp", tuple(notes))
    headless = f"has a representation layer of {representation} beside tokens of {width}, which no head of ours has"
    if num_classes == 0:
        headless = "has a representation layer and no head behind it"
    notes.append(f"The file {headless}: the layer and what follows it are left out.")
    return Inferred(config, image_size, 0, "linear", tuple(notes), headless)


def is_of_head(name: str) -> bool:
    """Whether an array, named without the prefix, is of the head."""
    return name.startswith(("head/", "pre_logits/"))


def _axes(shapes: Mapping[str, Shape], name: str, *, count: int) -> Shape:
    """The shape of an array with that many axes, none of them empty."""
    if name not in shapes:
        raise ValueError(f"the array {name!r} is missing, which fixes a size of the model")
    shape = shapes[name]
    if len(shape) != count or min(shape) < 1:
        raise ValueError(f"the array {name!r} has the shape {shape}, but should have {count} axes")
    return shape


def _count(names: Collection[str], pattern: str) -> int:
    """How many different numbers the names have at the group of `pattern`, which is at their beginning."""
    return len({match[1] for name in names if (match := re.match(pattern, name))})


def _resnet(shapes: Mapping[str, Shape], stem_patch_size: int) -> dict[str, Any]:
    """The sizes of a hybrid's stem, and the patch size in pixels; nothing without one."""
    if "conv_root/kernel" not in shapes:
        return {}
    stages = _count(shapes, r"block(\d+)/")
    layers = tuple(_count(shapes, rf"block{stage + 1}/unit(\d+)/") for stage in range(stages))
    channels = _axes(shapes, "conv_root/kernel", count=4)[3]
    if not all(layers) or channels % 64:
        raise ValueError(
            f"its ResNet stem has {channels} channels at the root and the units {layers} in its stages; "
            "supported are multiples of 64 channels, and no stage without units"
        )
    return {
        "resnet_layers": layers,
        "resnet_width_factor": channels // 64,
        "patch_size": stem_patch_size * resnet_stride(layers),
    }


def _named(sizes: dict[str, Any]) -> dict[str, Any]:
    """The variant that has exactly these sizes, else the sizes."""
    trunk = ("width", "depth", "heads", "mlp_dim")
    stem = ("patch_size", "resnet_layers", "resnet_width_factor")
    if "resnet_layers" in sizes:
        for name, variant in HYBRIDS.items():
            if all(getattr(variant, key) == sizes[key] for key in (*trunk, *stem)):
                return {"variant": name}
    else:
        for name, variant in VARIANTS.items():
            if all(getattr(variant, key) == sizes[key] for key in trunk):
                return {"variant": f"{name}/{sizes['patch_size']}"}
    return sizes


def _side(rows: int, *, has_class_token: bool) -> int:
    """Patches along a side, from the rows of position embeddings; one of them may be the class token's."""
    for patches in (rows, rows - 1) if has_class_token else (rows,):
        if patches and math.isqrt(patches) ** 2 == patches:
            return math.isqrt(patches)
    raise ValueError(f"its {rows} position embeddings belong to no square grid of patches; only those are supported")

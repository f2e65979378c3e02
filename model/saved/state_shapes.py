"""Infer sizes from a state dict's shapes, and explain why tensors and model do not fit.

Values are never compared. Shapes tell neither the number of heads nor GELU's form, epsilon or interpolation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shardvit.model.variants import HYBRIDS, VARIANTS, VitSizes, gated_mlp_dim, resnet_stride
from shardvit.model.vocabulary import ClassTokenPosition, HeadKind, Pool

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

_MAX_ROWS = 20
_STEM = "patch_embed.backbone."  # a hybrid's ResNet


@dataclass(frozen=True)
class StateSizes:
    """A Transformer's sizes, from its tensors."""

    trunk: VitSizes  # heads is 0: no shape tells it
    pool: Pool
    layer_scale: bool
    grid_size: int | None  # None without `pos_embed`
    num_classes: int  # 0 without a head
    head: HeadKind
    class_token_position: ClassTokenPosition = "learned"
    later: Mapping[str, Any] = field(default_factory=dict)  # of `LATER_BLOCKS` what shapes tell
    channels: int = 3  # of an image

    def in_words(self) -> str:
        it = self.trunk
        stem = f" (and resnet_layers {list(it.resnet_layers)})" if it.resnet_layers is not None else ""
        return f"--width {it.width} --depth {it.depth} --mlp-dim {it.mlp_dim} --patch-size {it.patch_size}{stem}"


def shapes_of(state: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Name -> shape."""
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def read_sizes(shapes: Mapping[str, Shape], *, origin: str, grid_size: int | None = None) -> StateSizes:
    """Infer a Vision Transformer's sizes from shapes under our names; ValueError (`origin` first) if impossible.
    `grid_size` of the positions, if known: 81 of them may be of 9 x 9 patches, or of 8 x 8 and 17 other tokens."""
    last_norm = "fc_norm.weight" if "fc_norm.weight" in shapes else "norm.weight"
    needed = ("patch_embed.proj.weight", "blocks.0.mlp.fc1.weight", last_norm)
    if missing := [name for name in needed if name not in shapes]:
        raise ValueError(
            f"{origin} has no tensor for our {', '.join(missing)}: it is incomplete, or no Vision Transformer"
        )
    patch = shapes["patch_embed.proj.weight"]
    if len(patch) != 4 or patch[2] != patch[3]:
        raise ValueError(f"{origin} has a patch embedding of shape {patch}: only square patches can be read")
    resnet_layers = _resnet_layers(shapes)
    grid_size = grid_size or _grid_size(shapes, origin=origin)
    of_patches = grid_size is not None and shapes["pos_embed"][1] == grid_size**2
    head = shapes.get("head.logits.weight") or shapes.get("head.weight")
    trunk = VitSizes(
        width=patch[0],
        depth=1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blocks.")),
        heads=0,
        mlp_dim=_mlp_dim(shapes),
        patch_size=patch[2] * (1 if resnet_layers is None else resnet_stride(resnet_layers)),
        resnet_layers=resnet_layers,
        resnet_width_factor=max(1, (shapes.get(f"{_STEM}stem.conv.weight", ()) or (64,))[0] // 64),
    )
    return StateSizes(
        trunk=trunk,
        pool=_pool(shapes),
        layer_scale="blocks.0.ls1.gamma" in shapes,
        grid_size=grid_size,
        num_classes=head[0] if head else 0,
        head="mlp" if "head.logits.weight" in shapes else "linear",
        class_token_position="none" if _prefix(shapes) and of_patches else "learned",
        later=_later(shapes),
        channels=_channels(shapes),
    )


def _pool(shapes: Mapping[str, Shape]) -> Pool:
    if "attn_pool.latent" in shapes:
        return "map"
    return "cls" if "cls_token" in shapes and "fc_norm.weight" not in shapes else "gap"


def _mlp_dim(shapes: Mapping[str, Shape]) -> int:
    """Hidden size; SwiGLU's first layer has twice as many rows."""
    first, last = shapes["blocks.0.mlp.fc1.weight"], shapes.get("blocks.0.mlp.fc2.weight", ())
    return last[1] if len(last) == 2 else first[0]


def _prefix(shapes: Mapping[str, Shape]) -> int:
    """Tokens before the patches."""
    return sum(_tokens(shapes, name) for name in ("cls_token", "reg_token", "dist_token"))


def _tokens(shapes: Mapping[str, Shape], name: str) -> int:
    shape = shapes.get(name, ())
    return shape[1] if len(shape) == 3 else 0


def _later(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    block = {name.removeprefix("blocks.0.") for name in shapes if name.startswith("blocks.0.")}
    gated = shapes["blocks.0.mlp.fc1.weight"][0] != _mlp_dim(shapes)
    found = {
        "registers": _tokens(shapes, "reg_token"),
        "distillation_token": "learned" if "dist_token" in shapes else None,
        "class_token": "kept" if "cls_token" in shapes and _pool(shapes) != "cls" else None,
        "final_norm": "pooled" if "fc_norm.weight" in shapes else None,
        "qk_norm": "per_head" if "attn.q_norm.weight" in block else None,
        "mlp": ("swiglu_norm" if "mlp.norm.weight" in block else "swiglu") if gated else None,
        "norm": "rms" if "norm1.weight" in block and "norm1.bias" not in block else None,
        "rope": "mixed" if "attn.freqs" in block else None,
    }
    return {name: value for name, value in found.items() if value}


def variant_of(sizes: StateSizes, *, heads: int | None = None) -> str | None:
    """Named variant with these sizes (and heads, if given), or None."""
    named = {f"{name}/{sizes.trunk.patch_size}": variant for name, variant in VARIANTS.items()} | HYBRIDS
    for name, variant in named.items():
        mlp_dim = gated_mlp_dim(variant.mlp_dim) if "mlp" in sizes.later else variant.mlp_dim
        patch_size = variant.patch_size or sizes.trunk.patch_size
        trunk = replace(variant, heads=0, patch_size=patch_size, mlp_dim=mlp_dim)
        if trunk == sizes.trunk and heads in (None, variant.heads):
            return name
    return None


def first_difference(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> str:
    """Describe the alphabetically first name whose shapes differ."""
    name = min(name for name in {**found, **expected} if found.get(name) != expected.get(name))
    if name not in found:
        return f"{name!r} is missing"
    if name not in expected:
        return f"{name!r} does not belong to it"
    return f"{name!r} has the shape {found[name]} instead of {expected[name]}"


def describe_differences(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> str:
    """Table of the first 20 names whose shapes differ, then a line for each possible fix; "" if none differ."""
    names = sorted((name for name in {*found, *expected} if found.get(name) != expected.get(name)), key=_in_order)
    if not names:
        return ""
    rows = [("name", "in the file", "in the model")]
    rows += [(name, str(found.get(name, "missing")), str(expected.get(name, "missing"))) for name in names[:_MAX_ROWS]]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"  {name:<{widths[0]}}  {left:<{widths[1]}}  {right}" for name, left, right in rows]
    if len(names) > _MAX_ROWS:
        lines.append(f"  and {len(names) - _MAX_ROWS} more")
    return "\n".join([*lines, *_what_would_fix_it(found, expected)])


def _what_would_fix_it(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> list[str]:
    if not found.keys() & expected.keys():
        return ["No name is one of this model's: the file holds another kind of model, or names it in another way."]
    missing, extra = len(expected.keys() - found.keys()), len(found.keys() - expected.keys())
    other = f"Tensors that are missing: {missing}; that do not belong to the model: {extra}; the rest differ in shape."
    try:
        model = read_sizes(expected, origin="the model")
    except ValueError:  # no Transformer: nothing to suggest
        return [other]
    try:
        file = read_sizes(found, origin="The file")
    except ValueError as error:
        return [f"{error}."]
    token, tokens = file.class_token_position, model.class_token_position
    fixes = {
        _other_trunk(file): file.trunk != model.trunk,
        f"The file pools by {file.pool}, the model by {model.pool}: give pool {file.pool}.": file.pool != model.pool,
        f"The file's class_token_position is {token}, the model's {tokens}: give the file's.": token != tokens,
        "The file has layer scale (blocks.*.ls1, ls2), the model has none: give layer_scale.": (
            file.layer_scale and not model.layer_scale
        ),
        "The model has layer_scale, the file has none: leave it out.": model.layer_scale and not file.layer_scale,
        f"The file has {_words(file.later)}, the model {_words(model.later)}: give the file's.": (
            file.later != model.later
        ),
        _other_grid(file, model): file.grid_size != model.grid_size,
        _other_head(file, model): (file.head, file.num_classes) != (model.head, model.num_classes),
    }
    return [fix for fix, is_needed in fixes.items() if is_needed] or [
        f"{other} Sizes, resolution and classes are the same: the file is incomplete, or of a model with parts that "
        "this one does not have."
    ]


def _words(later: Mapping[str, Any]) -> str:
    return " and ".join(f"{name} {value}" for name, value in later.items()) or "only the paper's parts"


def _other_trunk(file: StateSizes) -> str:
    if variant := variant_of(file):
        return f"The file holds a {variant}: give --variant {variant}."
    return f"The file holds a model of other sizes: give {file.in_words()} and its --heads."


def _other_grid(file: StateSizes, model: StateSizes) -> str:
    if file.grid_size is None or model.grid_size is None:
        return "Learned 1-D position embeddings (pos_embed) are in one of the two only: give the other's position."
    theirs, ours = file.grid_size * file.trunk.patch_size, model.grid_size * model.trunk.patch_size
    return (
        f"The file was trained on images of {theirs} pixels ({file.grid_size} x {file.grid_size} patches), the model "
        f"is for {ours}: import with --image-size {ours} to interpolate, or give {theirs}."
    )


def _other_head(file: StateSizes, model: StateSizes) -> str:
    if file.num_classes == 0:
        return f"The file has no head: import with --num-classes {model.num_classes} to attach a zero one."
    if file.num_classes != model.num_classes:
        return (
            f"The file has {file.num_classes} classes, the model {model.num_classes}: give --num-classes "
            f"{file.num_classes} to keep the file's head, or import with --num-classes {model.num_classes} to replace "
            "it by a zero one."
        )
    return f"The file's head is {file.head}, the model's is {model.head}: the record must say {file.head}."


def _in_order(name: str) -> list[tuple[int, str]]:
    """Sort blocks.2 before blocks.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"[.]", name)]


def _channels(shapes: Mapping[str, Shape]) -> int:
    """Channels of an image; 3 where a stem's convolution is not told in full (of an npz, before it is read)."""
    first = shapes.get(f"{_STEM}stem.conv.weight") if _resnet_layers(shapes) is not None else None
    first = shapes["patch_embed.proj.weight"] if first is None else first
    return first[1] if len(first) == 4 else 3


def _grid_size(shapes: Mapping[str, Shape], *, origin: str) -> int | None:
    if "pos_embed" not in shapes:
        return None
    shape = shapes["pos_embed"]
    num_patches = shape[1] - (0 if _is_of_patches(shape) else _prefix(shapes)) if len(shape) == 3 else 0
    grid_size = math.isqrt(max(0, num_patches))
    if grid_size == 0 or grid_size**2 != num_patches:
        raise ValueError(
            f"{origin} has position embeddings of shape {shape}: {num_patches} patches are no square grid, and only "
            "models of square images can be read"
        )
    return grid_size


def _is_of_patches(shape: Shape | None) -> bool:
    return shape is not None and len(shape) == 3 and math.isqrt(shape[1]) ** 2 == shape[1]


def _resnet_layers(shapes: Mapping[str, Shape]) -> tuple[int, ...] | None:
    if not any(name.startswith(_STEM) for name in shapes):
        return None
    paths = [name.removeprefix(_STEM).split(".") for name in shapes if name.startswith(f"{_STEM}stages.")]
    units = {(int(stage), int(unit)) for _, stage, _, unit, *_ in paths}
    return tuple(sum(stage == of for of, _ in units) for stage in sorted({stage for stage, _ in units}))

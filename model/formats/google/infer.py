"""The model in one of Google's npz files, from the shapes of its arrays: the files carry no configuration.

Reads the arrays that fix a size; `npz` checks whether the others fit. What no shape tells is what both code bases
always do (tanh GELU, epsilon 1e-6, their interpolation), except a resolution without learned positions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from model.formats.external_model import NO_HINTS, ExternalModel, Semantics, UserHints, config_of, lost_blocks
from model.formats.google.names import PATCH_KERNEL, NpzLayout
from model.saved.state_shapes import Shape, read_sizes

USUAL_IMAGE_SIZE = 224  # pixels; of pre-training in both code bases' configurations


def infer_model(shapes: Mapping[str, Shape], *, layout: NpzLayout, said: UserHints = NO_HINTS) -> ExternalModel:
    """The model whose arrays, named without the prefix, have these shapes; its weights are still to be read.

    A head whose representation layer has another width than the trunk, or that lacks its last layer, is left out.
    Raises ValueError if an array that fixes a size is missing or impossible, or if blocks or position embeddings
    are probably missing and the user does not say that this is intended.
    """
    height, side, channels, width = _axes(shapes, PATCH_KERNEL, count=4)
    block = layout.block(0)
    attention = _axes(shapes, f"{block}{layout.part('attn')}/query/kernel", count=3 + layout.stacked)
    mlp = _axes(shapes, f"{block}{layout.part('mlp')}/Dense_0/kernel", count=2 + layout.stacked)
    heads, head_dim = attention[-2:]
    if heads * head_dim != width:
        raise ValueError(f"{heads} attention heads of {head_dim} do not make tokens of {width}")
    if not (layout.position or said.position):
        raise ValueError(
            "it has no position embeddings: it is incomplete; if it is one of big_vision's with fixed ones, give "
            "--position sincos_2d (or none, for a model without any)"
        )
    blocks = {match[1] for name in shapes if (match := re.match(r"Transformer/encoderblock_(\d+)/", name))}
    depth = attention[0] if layout.stacked else len(blocks)
    ours = {
        "patch_embed.proj.weight": (width, channels, height, side),
        "blocks.0.mlp.fc1.weight": (mlp[-1], width),
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
    semantics = Semantics("tanh", 1e-6, "google", heads=heads, position=None if layout.position else said.position)
    config, notes = config_of(sizes, semantics=semantics, given=None, origin="it")
    if said.depth is None and (lost := lost_blocks(config.sizes)):
        raise ValueError(f"it {lost}")
    grid_size = sizes.grid_size
    if grid_size is None:
        grid_size = max(1, USUAL_IMAGE_SIZE // sizes.trunk.patch_size)
        notes += (
            f"The file has no position embeddings ({said.position}), which tell the resolution: taken as the usual "
            f"one, {grid_size * sizes.trunk.patch_size} pixels.",
        )
    head, headless = "linear", "has no head"
    if "pre_logits/kernel" in shapes:
        representation = _axes(shapes, "pre_logits/kernel", count=2)[1]
        if sizes.num_classes == 0:
            headless = "has a representation layer and no head behind it"
        elif representation == width:
            head = "mlp"
        else:
            headless = (
                f"has a representation layer of {representation} beside tokens of {width}, which no head of ours has"
            )
    if headless != "has no head":
        notes += (f"The file {headless}: the layer and what follows it are left out.",)
    return ExternalModel(
        format=f"Google's npz ({layout.code_base})",
        state={},
        config=config,
        image_size=grid_size * sizes.trunk.patch_size,
        num_classes=sizes.num_classes if headless == "has no head" else 0,
        head=head,
        eval_protocol="vit" if layout.code_base == "vision_transformer" else "big_vision",
        headless=headless,
        notes=notes,
    )


def _axes(shapes: Mapping[str, Shape], name: str, *, count: int) -> Shape:
    """The shape of an array with that many axes, none of them empty."""
    if name not in shapes:
        raise ValueError(f"the array {name!r} is missing, which fixes a size of the model")
    shape = shapes[name]
    if len(shape) != count or min(shape) < 1:
        raise ValueError(f"the array {name!r} has the shape {shape}, but should have {count} axes")
    return shape


def _stem(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes that tell the sizes of a hybrid's stem, under our names; empty without one."""
    if "conv_root/kernel" not in shapes:
        return {}
    channels = _axes(shapes, "conv_root/kernel", count=4)[3]
    if channels % 64:
        raise ValueError(f"its ResNet stem has {channels} channels at the root: only multiples of 64 are supported")
    units = [match for name in shapes if (match := re.match(r"block(\d+)/unit(\d+)/", name))]
    stem = {f"patch_embed.backbone.stages.{int(unit[1]) - 1}.blocks.{int(unit[2]) - 1}.conv1": () for unit in units}
    return stem | {"patch_embed.backbone.stem.conv.weight": (channels,)}

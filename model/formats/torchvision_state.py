"""torchvision's Vision Transformers (`vit_b_16` and others): their state dict, both ways.

torchvision's class has GELU in the erf form and LayerNorm of epsilon 1e-6, and a state dict tells neither: a reader
takes these two, a writer says what to change for a model of other semantics. Costs one copy of the weights. It does
not read models with a convolutional stem (`conv_stem_configs`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from model.config import ModelConfig
from model.differences import read_sizes, shapes_of
from model.formats.foreign import IMAGENET_MEAN, IMAGENET_STD, Foreign, Semantics, config_of
from model.saved import SavedModelMeta

if TYPE_CHECKING:
    from torch import Tensor

# theirs -> ours, by the longest name first; the rest of each name (weight, bias) stays
_MODULES = {
    "class_token": "cls_token",
    "encoder.pos_embedding": "pos_embed",
    "conv_proj": "patch_embed.proj",
    "encoder.ln": "norm",
    "heads.pre_logits": "head.pre_logits",
    "heads.head": "head",
}
_IN_BLOCKS = {
    "ln_1.": "norm1.",
    "ln_2.": "norm2.",
    "self_attention.in_proj_": "attn.qkv.",
    "self_attention.out_proj.": "attn.proj.",
    "mlp.0.": "mlp.fc1.",
    "mlp.3.": "mlp.fc2.",
}
_OLD_IN_BLOCKS = {"mlp.linear_1.": "mlp.fc1.", "mlp.linear_2.": "mlp.fc2."}  # torchvision before 0.14
_BLOCK = re.compile(r"encoder\.layers\.encoder_layer_(\d+)\.(.+)")
_BUILDERS = {"B/16": "vit_b_16", "B/32": "vit_b_32", "L/16": "vit_l_16", "L/32": "vit_l_32", "H/14": "vit_h_14"}


def is_torchvision_state(names: Collection[str]) -> bool:
    """Whether these are the names of torchvision's VisionTransformer."""
    return "class_token" in names and any(name.startswith("encoder.layers.encoder_layer_0.") for name in names)


def read_torchvision_state(state: Mapping[str, Tensor], *, config: ModelConfig | None, origin: str) -> Foreign:
    """A state dict of torchvision's VisionTransformer.

    Raises:
        ValueError: it has a convolutional stem, or does not tell what `config` must then say.
    """
    if any(name.startswith("conv_proj.conv_bn_relu") for name in state):
        raise ValueError(f"{origin} has a convolutional stem (conv_stem_configs): we build no such model")
    mlp_head = any(name.startswith("heads.pre_logits.") for name in state)
    renamed = {_our_name(name, mlp_head=mlp_head): value for name, value in state.items()}
    sizes = read_sizes(shapes_of(renamed), origin=origin)
    if sizes.grid_size is None:
        raise ValueError(f"{origin} has no encoder.pos_embedding: it is incomplete")
    semantics = Semantics(gelu="erf", layer_norm_eps=1e-6, interpolation="google")
    found, notes = config_of(sizes, semantics=semantics, given=config, origin=origin)
    return Foreign(
        format="torchvision state dict",
        state=renamed,
        config=found,
        image_size=sizes.grid_size * found.sizes.patch_size,
        num_classes=sizes.num_classes,
        head=sizes.head,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        eval_protocol="big_vision",  # resize to 256, crop 224, bilinear: torchvision's ImageClassification preset
        eval_crop_share=224 / 256,
        notes=(
            *notes,
            "the file does not tell pixels and GELU: taken as torchvision has them (ImageNet's mean and deviation, "
            f"GELU {found.gelu})",
            f"positions would be interpolated by the kernel {found.interpolation} (bilinear, corners aligned; "
            "torchvision's own default is bicubic, corners aligned)"
            if found.interpolation == "google"
            else f"positions would be interpolated by the kernel {found.interpolation}",
        ),
    )


def torchvision_objection(meta: SavedModelMeta) -> str | None:
    """Why torchvision's VisionTransformer cannot hold this model; None: it can."""
    config = meta.model
    if config.kind == "resnet" or config.sizes.resnet_layers is not None:
        return "torchvision has no hybrids of Google's kind and no such ResNets"
    if config.pool != "cls":
        return f"torchvision has no pooling {config.pool}, only the class token"
    if config.position != "learned_1d" or config.position_at != "stem":
        return f"torchvision has no position embedding {config.position} at {config.position_at}"
    if config.layer_scale is not None:
        return "torchvision has no layer scale"
    if meta.head == "masked_patch":
        return "a masked-patch head is no classifier"
    return None


def write_torchvision_state(path: Path, state: Mapping[str, Tensor], *, meta: SavedModelMeta) -> None:
    """Write the state dict, renamed, with `torch.save`; `torchvision_objection(meta)` is None."""
    import torch

    torch.save({_their_name(name): value.detach().cpu().contiguous() for name, value in state.items()}, path)


def how_to_load(meta: SavedModelMeta, *, file: Path) -> list[str]:
    """Lines of Python that load the file into torchvision's own class with our logits."""
    config, sizes = meta.model, meta.model.sizes
    more = f", representation_size={sizes.width}" if meta.head == "mlp" else ""
    if config.layer_norm_eps != 1e-6:
        more += f", norm_layer=functools.partial(torch.nn.LayerNorm, eps={config.layer_norm_eps:g})"
    builder = _BUILDERS.get(config.variant or "")
    lines = [
        f"model = torchvision.models.{builder}(image_size={meta.image_size}, num_classes={meta.num_classes}{more})"
        if builder
        else f"model = torchvision.models.VisionTransformer(image_size={meta.image_size}, "
        f"patch_size={sizes.patch_size}, num_layers={sizes.depth}, num_heads={sizes.heads}, "
        f"hidden_dim={sizes.width}, mlp_dim={sizes.mlp_dim}, num_classes={meta.num_classes}{more})",
        f"model.load_state_dict(torch.load({str(file)!r}, weights_only=True))",
    ]
    if config.gelu == "tanh":
        lines += [
            "for name in [name for name, module in model.named_modules() if isinstance(module, torch.nn.GELU)]:",
            '    model.set_submodule(name, torch.nn.GELU(approximate="tanh"))',
        ]
    return lines


def _our_name(name: str, *, mlp_head: bool) -> str:
    """torchvision's name of a parameter -> ours; a name that is not theirs stays."""
    block = _BLOCK.fullmatch(name)
    if block:
        index, inside = block.groups()
        for theirs, ours in (_IN_BLOCKS | _OLD_IN_BLOCKS).items():
            if inside.startswith(theirs):
                return f"blocks.{index}.{ours}{inside.removeprefix(theirs)}"
        return name
    for theirs, ours in _MODULES.items():
        if name == theirs or name.startswith(f"{theirs}."):
            ours = "head.logits" if ours == "head" and mlp_head else ours
            return f"{ours}{name.removeprefix(theirs)}"
    return name


def _their_name(name: str) -> str:
    """Our name of a parameter -> torchvision's."""
    if name.startswith("blocks."):
        _, index, inside = name.split(".", 2)
        for theirs, ours in _IN_BLOCKS.items():
            if inside.startswith(ours):
                return f"encoder.layers.encoder_layer_{index}.{theirs}{inside.removeprefix(ours)}"
    for theirs, ours in {**_MODULES, "heads.head": "head.logits"}.items():
        if name == ours or name.startswith(f"{ours}."):
            return f"{theirs}{name.removeprefix(ours)}"
    # last: "head." is the beginning of the other two
    return f"heads.{name}"

"""Read and write the state dict of torchvision's Vision Transformers (`vit_b_16` and others).

torchvision uses erf GELU and LayerNorm epsilon 1e-6, which a state dict does not record: reading assumes them, writing
says what to change otherwise. Models with a convolutional stem (`conv_stem_configs`) are not read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardvit.model.config import ModelConfig
from shardvit.model.formats.external_model import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ExternalModel,
    Names,
    Semantics,
    of_shapes,
    plain_vit_objection,
    with_all_positions,
)
from shardvit.model.saved.model_folder import SavedModelMeta
from shardvit.model.vocabulary import COLOUR_CHANNELS

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = Names(
    outside={
        "class_token": "cls_token",
        "encoder.pos_embedding": "pos_embed",
        "conv_proj.": "patch_embed.proj.",
        "encoder.ln.": "norm.",
        "heads.pre_logits.": "head.pre_logits.",
        "heads.logits.": "head.logits.",  # theirs is heads.head. next to pre_logits, too
        "heads.head.": "head.",
    },
    block="encoder.layers.encoder_layer_{}.",
    inside={
        "ln_1.": "norm1.",
        "ln_2.": "norm2.",
        "self_attention.in_proj_": "attn.qkv.",
        "self_attention.out_proj.": "attn.proj.",
        "mlp.0.": "mlp.fc1.",
        "mlp.3.": "mlp.fc2.",
    },
    other_inside={"mlp.linear_1.": "mlp.fc1.", "mlp.linear_2.": "mlp.fc2."},  # before 0.14
)
_BUILDERS = {"B/16": "vit_b_16", "B/32": "vit_b_32", "L/16": "vit_l_16", "L/32": "vit_l_32", "H/14": "vit_h_14"}


def is_torchvision_state(names: Collection[str]) -> bool:
    """True if the names are those of torchvision's VisionTransformer."""
    return "class_token" in names and any(name.startswith("encoder.layers.encoder_layer_0.") for name in names)


def read_torchvision_state(state: Mapping[str, Tensor], *, config: ModelConfig | None, origin: str) -> ExternalModel:
    """Read a state dict; ValueError if it has a convolutional stem or needs a `config`."""
    if any(name.startswith("conv_proj.conv_bn_relu") for name in state):
        raise ValueError(f"{origin} has a convolutional stem (conv_stem_configs): we build no such model")
    if any(name.startswith("heads.pre_logits.") for name in state):
        state = {name.replace("heads.head.", "heads.logits."): value for name, value in state.items()}
    external = of_shapes(
        {_NAMES.ours(name): value for name, value in state.items()},
        format="torchvision state dict",
        semantics=Semantics(gelu="erf", layer_norm_eps=1e-6, interpolation="google"),
        given=config,
        origin=origin,
    )
    kernel = external.config.interpolation
    theirs = " (bilinear, corners aligned; torchvision's own default is bicubic, corners aligned)"
    return replace(
        external,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        eval_protocol="big_vision",  # resize to 256, crop 224, bilinear: torchvision's ImageClassification preset
        eval_crop_share=224 / 256,
        notes=(
            *external.notes,
            "the file does not tell pixels and GELU: taken as torchvision has them (ImageNet's mean and deviation, "
            f"GELU {external.config.gelu})",
            f"positions would be interpolated by the kernel {kernel}{theirs if kernel == 'google' else ''}",
        ),
    )


def torchvision_objection(meta: SavedModelMeta) -> str | None:
    """Why torchvision's VisionTransformer cannot hold this model, or None."""
    if meta.model.channels != COLOUR_CHANNELS:
        return f"it takes {meta.model.channels} channels, and torchvision's VisionTransformer {COLOUR_CHANNELS}"
    return plain_vit_objection(meta.model, whose="torchvision's VisionTransformer")


def write_torchvision_state(path: Path, state: Mapping[str, Tensor], *, meta: SavedModelMeta) -> None:
    """Write the renamed state dict with `torch.save`; requires `torchvision_objection(meta)` to be None."""
    import torch

    state = with_all_positions(state, meta=meta)
    renamed = {_NAMES.theirs(name).replace("heads.logits.", "heads.head."): value for name, value in state.items()}
    torch.save({name: value.detach().cpu().contiguous() for name, value in renamed.items()}, path)


def how_to_load(meta: SavedModelMeta, *, file: Path) -> list[str]:
    """Python lines that load the file into torchvision's class with our logits."""
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

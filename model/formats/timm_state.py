"""Read timm's Vision Transformers: a folder that timm or transformers' TimmWrapper wrote, or bare weights.

timm builds the architecture in `config.json` without memory; any difference from ours is refused. Its hybrids are not
read: their weight standardisation and GroupNorm have other epsilons. Costs one copy of the weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardvit.model.config import ModelConfig
from shardvit.model.formats.external_model import ExternalModel, Semantics, add_qkv_biases, config_of, of_shapes
from shardvit.model.formats.weights_file import load_folder_weights
from shardvit.model.saved.state_shapes import describe_differences, read_sizes, shapes_of
from shardvit.model.vocabulary import EvalProtocol, Gelu, Pool

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer
    from torch import Tensor, nn

_POOLS: dict[str, Pool] = {"token": "cls", "avg": "gap", "map": "map"}
_GELUS: dict[str, Gelu] = {"GELU(approximate='none')": "erf", "GELU()": "erf", "GELU(approximate='tanh')": "tanh"}
_GELUS |= {"GELUTanh()": "tanh"}

_FC_NORM = "a norm after the pooling (fc_norm), and the norm of a mean is not the mean of normed tokens"
# Names in a state dict that reveal timm parameters unknown to our models.
_UNKNOWN_PARTS = {
    "reg_token": "register tokens",
    "dist_token": "a distillation token",
    "head_dist.": "a distillation head",
    "norm_pre.": "a norm before the blocks (pre_norm)",
    "fc_norm.": _FC_NORM,
    ".q_norm.": "norms on queries and keys (qk_norm)",
    ".attn.norm.": "a norm inside attention (scale_attn_norm)",
    ".mlp.norm.": "a norm inside the MLP (scale_mlp_norm)",
    ".mlp.fc1_g.": "SwiGLU MLPs",
    ".mlp.w12.": "SwiGLU MLPs",
    ".attn.gate.": "gated attention",
}


def is_timm_state(names: Collection[str]) -> bool:
    """True for the names of a timm Vision Transformer, which are also ours."""
    return "patch_embed.proj.weight" in names and any(name.startswith("blocks.0.") for name in names)


def read_timm_state(state: dict[str, Tensor], *, config: ModelConfig | None, origin: str) -> ExternalModel:
    """Read a bare state dict; ValueError if it has parts that our models lack, or needs a `config`."""
    _refuse_unknown_parts(state, origin=origin)
    if config is None and any(name.startswith("patch_embed.backbone.") for name in state):
        raise ValueError(
            f"{origin} has a ResNet stem and does not tell whose: for one of Google's code or of shardvit give its "
            "--variant; timm's own hybrids have other epsilons than Google's and cannot be read"
        )
    state = dict(state)
    notes = add_qkv_biases(state)
    semantics = Semantics(gelu="erf", layer_norm_eps=1e-6, interpolation="timm")
    external = of_shapes(state, format="timm state dict", semantics=semantics, given=config, origin=origin)
    assumed = (
        f"a bare state dict tells neither GELU nor pixels: taken as GELU {external.config.gelu}, epsilon "
        f"{external.config.layer_norm_eps:g}, pixels (x - 0.5) / 0.5, as timm has it for Google's weights"
    )
    return replace(external, eval_protocol="timm", notes=(*notes, *external.notes, assumed))


def read_timm_folder(folder: Path, *, content: dict[str, Any], config: ModelConfig | None) -> ExternalModel:
    """Read a folder, `content` being its `config.json`; ValueError if timm or our models lack its architecture."""
    from timm.data.config import resolve_data_config

    origin = str(folder)
    state = load_folder_weights(folder)
    _refuse_unknown_parts(state, origin=origin)
    model: Any = _built_by_timm(content, origin=origin)
    if objection := _objection(model):
        raise ValueError(f"{origin} is timm's {content['architecture']} with {objection}: we build no such model")
    if differences := describe_differences(shapes_of(state), shapes_of(model.state_dict())):
        raise ValueError(f"{origin}: the weights are not those of the model in its config.json:\n{differences}")
    notes = add_qkv_biases(state)
    semantics = Semantics(
        gelu=_GELUS[repr(model.blocks[0].mlp.act)],
        layer_norm_eps=model.norm.eps,
        interpolation="timm",
        heads=model.blocks[0].attn.num_heads,
        layer_scale=getattr(model.blocks[0].ls1, "init_values", None),
    )
    external = of_shapes(state, format="timm folder", semantics=semantics, given=config, origin=origin)
    # compare timm's model with ours of the same sizes, whatever was asked for
    own, _ = config_of(read_sizes(shapes_of(state), origin=origin), semantics=semantics, given=None, origin=origin)
    _compare_structure(model, own, origin=origin)
    data = resolve_data_config(pretrained_cfg=dict(model.pretrained_cfg) | (content.get("pretrained_cfg") or {}))
    protocol, share, more = _evaluation(data)
    label_names = content.get("label_names") or ()
    return replace(
        external,
        class_names=tuple(map(str, label_names)) if len(label_names) == external.num_classes else (),
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        eval_protocol=protocol,
        eval_crop_share=share,
        notes=(*notes, *external.notes, *more),
    )


def _refuse_unknown_parts(state: dict[str, Tensor], *, origin: str) -> None:
    for part, what in _UNKNOWN_PARTS.items():
        name = next((name for name in state if name.startswith(part) or (part[0] == "." and part in name)), None)
        if name:
            raise ValueError(f"{origin} has {what}, see {name}: we build no such model")


def _built_by_timm(content: dict[str, Any], *, origin: str) -> VisionTransformer:
    import timm
    import torch
    from timm.models.vision_transformer import VisionTransformer

    architecture = content.get("architecture")
    if not isinstance(architecture, str) or not timm.is_model(architecture):
        raise ValueError(f"{origin}: config.json names the architecture {architecture!r}, which timm does not know")
    arguments = dict(content.get("model_args") or {})
    if "num_classes" in content:
        arguments["num_classes"] = content["num_classes"]
    # timm's factory would read anything else, and can load further files
    unknown = sorted(arguments.keys() - inspect.signature(VisionTransformer.__init__).parameters.keys())
    if unknown:
        raise ValueError(
            f"{origin}: config.json has the model_args {', '.join(unknown)}, which timm's VisionTransformer does not "
            "take"
        )
    try:
        with torch.device("meta"):
            model = timm.create_model(architecture, pretrained=False, **arguments)
    except (RuntimeError, TypeError, ValueError, KeyError, AssertionError, AttributeError) as error:
        raise ValueError(f"{origin}: timm cannot build {architecture} with its model_args: {error}") from error
    if type(model) is not VisionTransformer:
        raise ValueError(
            f"{origin} is timm's {architecture}, a {type(model).__name__}: only its VisionTransformer can be read"
        )
    return model


def _objection(model: VisionTransformer) -> str | None:
    from timm.layers.patch_embed import PatchEmbed
    from timm.models.vision_transformer import Block
    from torch import nn

    block = model.blocks[0]
    pool = _POOLS.get(model.global_pool)
    if type(model.patch_embed) is not PatchEmbed:
        return f"a patch embedding of the kind {type(model.patch_embed).__name__}"
    if model.patch_embed.proj.in_channels != 3:
        return f"{model.patch_embed.proj.in_channels} input channels"
    if model.patch_embed.grid_size[0] != model.patch_embed.grid_size[1]:
        return f"a grid of {model.patch_embed.grid_size} patches, which is not square"
    if not isinstance(model.norm, nn.LayerNorm):
        return f"{type(model.norm).__name__} as its last norm"
    if pool is None:
        return f"global_pool {model.global_pool!r}"
    if (pool == "cls") != (model.cls_token is not None):
        return f"a class token that global_pool {model.global_pool!r} does not read"
    if type(block) is not Block:
        return f"blocks of the kind {type(block).__name__}"
    activation = getattr(block.mlp, "act", None)
    if repr(activation) not in _GELUS:
        return f"the activation {type(activation).__name__}"
    return None


def _compare_structure(model: VisionTransformer, config: ModelConfig, *, origin: str) -> None:
    """Refuse any layer that differs from ours and that `_objection` does not name."""
    import torch

    from shardvit.model.vit import build_model

    image_size = model.patch_embed.grid_size[0] * model.patch_embed.patch_size[0]
    with torch.device("meta"):
        ours = _leaves(build_model(config, image_size=image_size, num_classes=1, head="linear"))
    theirs = _leaves(model)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"{origin}: timm's model has {theirs.get(name)} at {name} where ours has {ours.get(name)}: we build no "
                "such model"
            )


def _leaves(model: nn.Module) -> dict[str, str]:
    """Name -> description of each layer with weights; without the head and qkv, which may lack biases."""
    return {
        name: repr(module)
        for name, module in model.named_modules()
        if next(module.children(), None) is None
        and next(module.parameters(), None) is not None
        and not name.startswith("head")
        and not name.endswith(".qkv")
    }


def _evaluation(data: dict[str, Any]) -> tuple[EvalProtocol, float | None, list[str]]:
    """Our nearest evaluation protocol and crop share to timm's transforms, with a note if they differ."""
    kernel, mode, share = data["interpolation"], data["crop_mode"], float(data["crop_pct"])
    if mode == "squash":
        protocol, exact = "vit", kernel == "bilinear" and share == 1.0
    else:
        protocol = "timm" if kernel == "bicubic" else "big_vision"
        exact = mode == "center" and kernel in ("bicubic", "bilinear") and share <= 1
    note = (
        f"timm evaluates it with {kernel}, crop_mode {mode}, crop_pct {data['crop_pct']}: taken as the protocol "
        f"{protocol}, the nearest one here"
    )
    return protocol, None if mode == "squash" else min(share, 1.0), [] if exact else [note]

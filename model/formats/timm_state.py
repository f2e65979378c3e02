"""Read timm's Vision Transformers: a folder that timm or transformers' TimmWrapper wrote, or bare weights.

timm builds the architecture in `config.json` without memory; any difference from ours is refused. Of its Eva (EVA-02,
RoPE-ViT, DINOv3) folders are read, bare weights not: they do not tell how they rotate. Its hybrids are not
read: their weight standardisation and GroupNorm have other epsilons. Costs one copy of the weights.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardvit.model.config import ModelConfig
from shardvit.model.formats.external_model import ExternalModel, Semantics, add_qkv_biases, config_of, of_shapes
from shardvit.model.formats.weights_file import load_folder_weights
from shardvit.model.saved.model_folder import from_deit
from shardvit.model.saved.state_shapes import describe_differences, read_sizes, shapes_of
from shardvit.model.saved.timm_eva import from_eva
from shardvit.model.vocabulary import MOST_CHANNELS, EvalProtocol, Gelu, Pool, Rope

if TYPE_CHECKING:
    from torch import Tensor, nn

_POOLS: dict[str, Pool] = {"token": "cls", "avg": "gap", "map": "map"}
_GELUS: dict[str, Gelu] = {"GELU(approximate='none')": "erf", "GELU()": "erf", "GELU(approximate='tanh')": "tanh"}
_GELUS |= {"GELUTanh()": "tanh"}

# Names in a state dict that reveal timm parameters unknown to our models.
_UNKNOWN_PARTS = {
    "norm_pre.": "a norm before the blocks (pre_norm)",
    ".attn.norm.": "a norm inside attention (scale_attn_norm)",
    ".mlp.w12.": "SwiGLU MLPs under other names than timm's",
    ".attn.gate.": "gated attention",
}


def is_timm_state(names: Collection[str]) -> bool:
    """True for the names of a timm Vision Transformer, which are also ours."""
    return "patch_embed.proj.weight" in names and any(name.startswith("blocks.0.") for name in names)


def read_timm_state(state: dict[str, Tensor], *, config: ModelConfig | None, origin: str) -> ExternalModel:
    """Read a bare state dict; ValueError if it has parts that our models lack, or needs a `config`."""
    _refuse_unknown_parts(state, origin=origin)
    if of_eva := next(
        (name for name in state if name.endswith((".gamma_1", "_bias", "q_proj.weight", "_g.weight"))), None
    ):
        raise ValueError(
            f"{origin} has {of_eva}, as timm's Eva (EVA-02, RoPE-ViT, DINOv3), whose bare weights do not tell how they "
            "rotate: give the folder, with its config.json"
        )
    if config is None and any(name.startswith("patch_embed.backbone.") for name in state):
        raise ValueError(
            f"{origin} has a ResNet stem and does not tell whose: for one of Google's code or of shardvit give its "
            "--variant; timm's own hybrids have other epsilons than Google's and cannot be read"
        )
    state = from_deit(state)
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
    data = resolve_data_config(pretrained_cfg=dict(model.pretrained_cfg) | (content.get("pretrained_cfg") or {}))
    state, semantics = from_deit(from_eva(state)), _semantics(model, data)
    external = of_shapes(state, format="timm folder", semantics=semantics, given=config, origin=origin)
    # compare timm's model with ours of the same sizes, whatever was asked for
    sizes = read_sizes(shapes_of(state), origin=origin, grid_size=semantics.grid_size)
    own, _ = config_of(sizes, semantics=semantics, given=None, origin=origin)
    _compare_structure(model, own, origin=origin)
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


def _built_by_timm(content: dict[str, Any], *, origin: str) -> Any:
    import timm
    import torch
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    architecture = content.get("architecture")
    if not isinstance(architecture, str) or not timm.is_model(architecture):
        raise ValueError(f"{origin}: config.json names the architecture {architecture!r}, which timm does not know")
    arguments = dict(content.get("model_args") or {})
    if content.get("num_classes") is not None:
        arguments["num_classes"] = content["num_classes"]
    # timm's factory would read anything else, and can load further files
    taken = {name for kind in (VisionTransformer, Eva) for name in inspect.signature(kind.__init__).parameters}
    if unknown := sorted(arguments.keys() - taken):
        raise ValueError(
            f"{origin}: config.json has the model_args {', '.join(unknown)}, which timm's VisionTransformer does not "
            "take"
        )
    try:
        # As timm builds from a folder; `create_model` drops each None, such as init_values' (no layer scale).
        name, _, tag = architecture.partition(".")
        with torch.device("meta"):
            model = timm.model_entrypoint(name)(pretrained=False, pretrained_cfg=tag or None, **arguments)
    except (RuntimeError, TypeError, ValueError, KeyError, AssertionError, AttributeError) as error:
        raise ValueError(f"{origin}: timm cannot build {architecture} with its model_args: {error}") from error
    if type(model) not in (VisionTransformer, VisionTransformerDistilled, Eva):
        raise ValueError(
            f"{origin} is timm's {architecture}, a {type(model).__name__}: only its VisionTransformer and Eva can "
            "be read"
        )
    return model


def _semantics(model: Any, data: dict[str, Any]) -> Semantics:
    """What the weights' shapes do not tell, and what timm's model says of it."""
    block, last_norm = model.blocks[0], model.fc_norm if hasattr(model.fc_norm, "eps") else model.norm
    pool = _POOLS[model.global_pool]
    told = {"pool": pool, "rope": _rope(model) or "none"}
    if model.cls_token is not None and pool != "cls":
        told["class_token"] = "kept"
    gated = repr(block.mlp.act) not in _GELUS
    return Semantics(
        gelu="erf" if gated else _GELUS[repr(block.mlp.act)],
        layer_norm_eps=last_norm.eps,
        interpolation="timm",
        heads=block.attn.num_heads,
        layer_scale=getattr(block, "init_values", None) or getattr(getattr(block, "ls1", None), "init_values", None),
        position="none" if model.pos_embed is None else None,
        image_size=data["input_size"][-1] if model.pos_embed is None else None,
        grid_size=None if model.pos_embed is None else model.patch_embed.grid_size[0],
        told=told,
    )


def _rope(model: Any) -> Rope | None:
    """The kind of ours that rotates as timm's model; None if there is none."""
    from shardvit.model.positions.rotary import eva_arguments

    rope = getattr(model, "rope", None)
    if rope is None:
        return "none"
    types = {"RotaryEmbeddingCat": "cat", "RotaryEmbeddingMixed": "mixed", "RotaryEmbeddingDinoV3": "dinov3"}
    found = {
        "rope_type": types.get(type(rope).__name__),
        "rope_grid_indexing": rope.grid_indexing,
        "rope_temperature": rope.temperature,
        "rope_rotate_half": getattr(rope, "rotate_half", False),
        "ref_feat_shape": list(getattr(rope, "ref_feat_shape", None) or ()),
    }
    if getattr(rope, "grid_offset", 0) or getattr(rope, "in_pixels", False) or rope.aug_active:
        return None
    usual = {"ref_feat_shape": [], "rope_grid_indexing": "ij", "use_rot_pos_emb": True}
    kinds: tuple[Rope, ...] = ("axial", "mixed", "eva", "dinov3")
    return next((kind for kind in kinds if usual | eva_arguments(kind) == usual | found), None)


def _objection(model: Any) -> str | None:
    from timm.layers import AttentionRope, PatchEmbed, RmsNorm
    from timm.models.eva import EvaAttention, EvaBlock
    from timm.models.vision_transformer import Attention, Block
    from torch import nn

    block = model.blocks[0]
    pool = _POOLS.get(model.global_pool)
    if type(model.patch_embed) is not PatchEmbed:
        return f"a patch embedding of the kind {type(model.patch_embed).__name__}"
    if model.patch_embed.proj.in_channels > MOST_CHANNELS:
        return f"{model.patch_embed.proj.in_channels} input channels"
    if model.patch_embed.grid_size[0] != model.patch_embed.grid_size[1]:
        return f"a grid of {model.patch_embed.grid_size} patches, which is not square"
    norms = [each for each in (model.norm, model.fc_norm) if not isinstance(each, nn.Identity)]
    if len(norms) != 1 or not isinstance(norms[0], nn.LayerNorm | RmsNorm):
        return f"{' and '.join(type(each).__name__ for each in norms) or 'Identity'} as its last norm"
    if pool is None:
        return f"global_pool {model.global_pool!r}"
    if not isinstance(model.fc_norm, nn.Identity) and pool != "gap":
        return f"a norm after global_pool {model.global_pool!r}"
    if not isinstance(model.norm_pre, nn.Identity):
        return "a norm before the blocks (pre_norm)"
    if type(block) not in (Block, EvaBlock) or type(block.attn) not in (Attention, AttentionRope, EvaAttention):
        return f"blocks of the kind {type(block).__name__} with {type(block.attn).__name__}"
    if getattr(block.attn, "num_kv_groups", 1) != 1:
        return "fewer keys than queries (num_kv_heads)"
    if getattr(block, "gamma_1", None) is not None and block.gamma_2 is None:
        return "layer scale on attention alone"
    if (pool == "map" or getattr(model, "pool_include_prefix", False)) and _pools_prefix(model):
        return "class or register tokens in its pooling"
    if not _rope(model):
        return "rotations (rope) of another kind"
    activation, gated = getattr(block.mlp, "act", None), type(block.mlp).__name__ in ("GluMlp", "SwiGLU")
    if repr(activation) not in (("SiLU()",) if gated else _GELUS) or getattr(block.mlp, "gate_last", False):
        return f"the activation {type(activation).__name__} in a {type(block.mlp).__name__}"
    if not gated and not isinstance(getattr(block.mlp, "norm", None), nn.Identity):
        return "a norm inside a GELU MLP (scale_mlp_norm)"
    return None


def _pools_prefix(model: Any) -> bool:
    return bool(model.num_prefix_tokens) and getattr(model, "pool_include_prefix", True)


def _compare_structure(model: Any, config: ModelConfig, *, origin: str) -> None:
    """Refuse any layer that differs from ours and that `_objection` does not name."""
    import torch

    from shardvit.model.vit import build_model

    image_size = model.patch_embed.grid_size[0] * model.patch_embed.patch_size[0]
    with torch.device("meta"):
        ours = _leaves(build_model(config, image_size=image_size, num_classes=1, head="linear"))
    theirs = _leaves(model)
    if hasattr(model, "rope"):  # of Eva, other names and layers: without what `from_eva` makes one, or into layers
        ours, theirs = ({name: it for name, it in each.items() if _is_same_in_eva(name)} for each in (ours, theirs))
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"{origin}: timm's model has {theirs.get(name)} at {name} where ours has {ours.get(name)}: we build no "
                "such model"
            )


def _is_same_in_eva(name: str) -> bool:
    return not re.search(r"\.(ls[12]|[qkv]_proj|mlp\.(act|fc1\w*|drop1))$|^rope$", name)


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

"""timm's Vision Transformers: a folder that timm wrote (or transformers, through its TimmWrapper), or bare weights.

Our names are timm's, so nothing is renamed. What a folder's `config.json` means is asked of timm itself: it builds the
named architecture without memory, and whatever of it we would compute otherwise is refused in a sentence. Costs one
copy of the weights. It does not read timm's hybrids: their weight standardisation and GroupNorm have other epsilons.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.config import ModelConfig
from model.differences import describe_differences, read_sizes, shapes_of
from model.formats.foreign import Foreign, Semantics, config_of
from model.formats.weights_file import load_folder_weights
from model.vocabulary import Gelu, Pool

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer
    from torch import Tensor, nn

_POOLS: dict[str, Pool] = {"token": "cls", "avg": "gap", "map": "map"}
_GELUS: dict[str, Gelu] = {"GELU(approximate='none')": "erf", "GELU()": "erf", "GELU(approximate='tanh')": "tanh"}
_GELUS |= {"GELUTanh()": "tanh"}

_FC_NORM = "a norm after the pooling (fc_norm), and the norm of a mean is not the mean of normed tokens"
# What names in a state dict betray: timm's parameters that no model of ours has.
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
    """Whether these are the names of a timm Vision Transformer, and so ours."""
    return "patch_embed.proj.weight" in names and any(name.startswith("blocks.0.") for name in names)


def read_timm_state(state: dict[str, Tensor], *, config: ModelConfig | None, origin: str) -> Foreign:
    """A bare state dict under timm's names.

    Raises:
        ValueError: it has parts that our models do not have, or does not tell what `config` must then say.
    """
    _refuse_unknown_parts(state, origin=origin)
    notes: list[str] = []
    state = _completed(state, notes=notes)
    sizes = read_sizes(shapes_of(state), origin=origin)
    if sizes.resnet_layers is not None and config is None:
        raise ValueError(
            f"{origin} has a ResNet stem and does not tell whose: for one of Google's code or of shardvit give its "
            "--variant; timm's own hybrids have other epsilons than Google's and cannot be read"
        )
    if sizes.grid_size is None:
        raise ValueError(
            f"{origin} has no pos_embed, so its resolution and kind of positions are not told: import the folder that "
            "shardvit saved, or the file with its record FILE.json beside it"
        )
    semantics = Semantics(gelu="erf", layer_norm_eps=1e-6, interpolation="timm")
    found, more = config_of(sizes, semantics=semantics, given=config, origin=origin)
    notes += more
    notes.append(
        f"a bare state dict tells neither GELU nor pixels: taken as GELU {found.gelu}, epsilon "
        f"{found.layer_norm_eps:g}, pixels (x - 0.5) / 0.5, as timm has it for Google's weights"
    )
    return Foreign(
        format="timm state dict",
        state=state,
        config=found,
        image_size=sizes.grid_size * found.sizes.patch_size,
        num_classes=sizes.num_classes,
        head=sizes.head,
        eval_protocol="timm",
        notes=tuple(notes),
    )


def read_timm_folder(folder: Path, *, content: dict[str, Any], config: ModelConfig | None) -> Foreign:
    """A folder of timm or of transformers' TimmWrapper; `content` is its `config.json`.

    Raises:
        ValueError: timm does not know the architecture, or it computes something that our models do not.
    """
    from timm.data.config import resolve_data_config

    origin = str(folder)
    state = load_folder_weights(folder)
    _refuse_unknown_parts(state, origin=origin)
    model = _built_by_timm(content, origin=origin)
    objection = _objection(model)
    if objection:
        raise ValueError(f"{origin} is timm's {content['architecture']} with {objection}: we build no such model")
    differences = describe_differences(shapes_of(state), shapes_of(model.state_dict()))
    if differences:
        raise ValueError(f"{origin}: the weights are not those of the model in its config.json:\n{differences}")
    notes: list[str] = []
    state = _completed(state, notes=notes)
    sizes = read_sizes(shapes_of(state), origin=origin)
    found, more = config_of(sizes, semantics=_semantics(model), given=config, origin=origin)
    notes += more
    if config is not None:  # timm's model is compared with ours of the same sizes, whatever was asked for
        own, _ = config_of(sizes, semantics=_semantics(model), given=None, origin=origin)
    else:
        own = found
    _compare_structure(model, own, num_classes=sizes.num_classes, origin=origin)
    data = resolve_data_config(pretrained_cfg=_evaluated_as(model) | (content.get("pretrained_cfg") or {}))
    protocol, share = _evaluation(data, notes=notes)
    label_names = content.get("label_names") or ()
    return Foreign(
        format="timm folder",
        state=state,
        config=found,
        image_size=(sizes.grid_size or 0) * found.sizes.patch_size,
        num_classes=sizes.num_classes,
        head=sizes.head,
        class_names=tuple(map(str, label_names)) if len(label_names) == sizes.num_classes else (),
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        eval_protocol=protocol,
        eval_crop_share=share,
        notes=tuple(notes),
    )


def _refuse_unknown_parts(state: dict[str, Tensor], *, origin: str) -> None:
    for part, what in _UNKNOWN_PARTS.items():
        name = next((name for name in state if name.startswith(part) or (part[0] == "." and part in name)), None)
        if name:
            raise ValueError(f"{origin} has {what}, see {name}: we build no such model")


def _completed(state: dict[str, Tensor], *, notes: list[str]) -> dict[str, Tensor]:
    """The same model with the tensors that ours has besides, all zero: what timm leaves out on request."""
    import torch

    state = dict(state)
    weights = [name for name in state if name.endswith(".attn.qkv.weight")]
    if weights and not any(name.endswith(".attn.qkv.bias") for name in state):
        for name in weights:
            state[name.replace(".weight", ".bias")] = state[name].new_zeros(state[name].shape[0])
        notes.append("q, k and v have no biases: they became zeros, which training would move")
    positions = state.get("pos_embed")
    if "cls_token" in state and positions is not None and _is_square(positions.shape[1]):
        state["pos_embed"] = torch.cat([positions.new_zeros(1, 1, positions.shape[2]), positions], dim=1)
        notes.append("the class token has no position embedding (no_embed_class): it got a row of zeros")
    return state


def _is_square(number: int) -> bool:
    return round(number**0.5) ** 2 == number


def _built_by_timm(content: dict[str, Any], *, origin: str) -> VisionTransformer:
    """The architecture of a `config.json`, built by timm without memory."""
    import inspect

    import timm
    import torch
    from timm.models.vision_transformer import VisionTransformer

    architecture = content.get("architecture")
    if not isinstance(architecture, str) or not timm.is_model(architecture):
        raise ValueError(f"{origin}: config.json names the architecture {architecture!r}, which timm does not know")
    arguments = dict(content.get("model_args") or {})
    if "num_classes" in content:
        arguments["num_classes"] = content["num_classes"]
    # anything else would be read by timm's factory, which can load further files
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
    """What of a model that timm built has no place in ours."""
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
    if model.reg_token is not None:
        return "register tokens"
    if not isinstance(model.norm_pre, nn.Identity):
        return "a norm before the blocks (pre_norm)"
    if not isinstance(model.fc_norm, nn.Identity):
        return _FC_NORM
    if not isinstance(model.norm, nn.LayerNorm):
        return f"{type(model.norm).__name__} as its last norm"
    if pool is None:
        return f"global_pool {model.global_pool!r}"
    if (pool == "cls") != (model.cls_token is not None):
        return f"a class token that global_pool {model.global_pool!r} does not read"
    if type(block) is not Block:
        return f"blocks of the kind {type(block).__name__}"
    if not isinstance(block.attn.q_norm, nn.Identity):
        return "norms on queries and keys (qk_norm)"
    activation = getattr(block.mlp, "act", None)
    if repr(activation) not in _GELUS:
        return f"the activation {type(activation).__name__}"
    return None


def _compare_structure(model: VisionTransformer, config: ModelConfig, *, num_classes: int, origin: str) -> None:
    """Refuse what `_objection` does not know by name: any layer that is another one than ours at its place."""
    import torch

    from model.build import build_model

    with torch.device("meta"):
        ours = _leaves(
            build_model(config, image_size=_image_size(model), num_classes=max(1, num_classes), head="linear")
        )
    theirs = _leaves(model)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"{origin}: timm's model has {theirs.get(name)} at {name} where ours has {ours.get(name)}: we build no "
                "such model"
            )


def _leaves(model: nn.Module) -> dict[str, str]:
    """Name -> description of each layer that has weights; not of the head, nor of qkv, which may lack biases."""
    return {
        name: repr(module)
        for name, module in model.named_modules()
        if next(module.children(), None) is None
        and next(module.parameters(), None) is not None
        and not name.startswith("head")
        and not name.endswith(".qkv")
    }


def _semantics(model: Any) -> Semantics:
    """What a model that timm built computes, beyond its shapes."""
    return Semantics(
        gelu=_GELUS[repr(model.blocks[0].mlp.act)],
        layer_norm_eps=model.norm.eps,
        interpolation="timm",
        heads=model.blocks[0].attn.num_heads,
        layer_scale=getattr(model.blocks[0].ls1, "init_values", None),
    )


def _evaluated_as(model: Any) -> dict[str, Any]:
    """What the architecture has where a folder says nothing of pixels."""
    return dict(model.pretrained_cfg)


def _image_size(model: VisionTransformer) -> int:
    return model.patch_embed.grid_size[0] * model.patch_embed.patch_size[0]


def _evaluation(data: dict[str, Any], *, notes: list[str]) -> tuple[str, float | None]:
    """Our evaluation protocol and crop share nearest to timm's transforms."""
    squash, share = data["crop_mode"] == "squash", float(data["crop_pct"])
    if squash:
        protocol, share, exact = "vit", None, data["interpolation"] == "bilinear" and data["crop_pct"] == 1.0
    elif data["interpolation"] == "bicubic":
        protocol, exact = "timm", data["crop_mode"] == "center"
    else:
        protocol, exact = "big_vision", data["crop_mode"] == "center" and data["interpolation"] == "bilinear"
    if not exact or (share is not None and share > 1):
        share = None if share is None else min(share, 1.0)
        notes.append(
            f"timm evaluates it with {data['interpolation']}, crop_mode {data['crop_mode']}, crop_pct "
            f"{data['crop_pct']}: taken as the protocol {protocol}, the nearest one here"
        )
    return protocol, share

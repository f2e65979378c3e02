"""Read and write transformers' own ViT (`ViTForImageClassification`, not its TimmWrapper): a folder, or bare weights.

A folder is `config.json`, `model.safetensors` and `preprocessor_config.json`. Tensors are named as on the Hub; version
5's internal names are read too. DeiT, BEiT, DINOv2 and tensors unused in classification are not read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardvit.model.config import ModelConfig
from shardvit.model.formats.external_model import (
    GOOGLE_MEAN,
    GOOGLE_STD,
    ExternalModel,
    Names,
    Semantics,
    add_qkv_biases,
    of_shapes,
    plain_vit_objection,
    with_all_positions,
)
from shardvit.model.formats.weights_file import load_folder_weights
from shardvit.model.saved.atomic import replaced_file
from shardvit.model.saved.model_folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    SavedModelMeta,
    read_json,
    read_side_record,
    write_json,
    write_safetensors,
)
from shardvit.model.vocabulary import Gelu

if TYPE_CHECKING:
    from torch import Tensor

PREPROCESSOR_FILE = "preprocessor_config.json"
MODEL_TYPE = "vit"

_NAMES = Names(  # without the classifier trunk's "vit."; q, k and v are separate
    outside={
        "embeddings.cls_token": "cls_token",
        "embeddings.position_embeddings": "pos_embed",
        "embeddings.patch_embeddings.projection.": "patch_embed.proj.",
        "layernorm.": "norm.",
        "classifier.": "head.",
    },
    block="encoder.layer.{}.",
    inside={
        "layernorm_before.": "norm1.",
        "layernorm_after.": "norm2.",
        "attention.attention.query.": "attn.q.",
        "attention.attention.key.": "attn.k.",
        "attention.attention.value.": "attn.v.",
        "attention.output.dense.": "attn.proj.",
        "intermediate.dense.": "mlp.fc1.",
        "output.dense.": "mlp.fc2.",
    },
    other_blocks=("layers.{}.",),  # version 5's internal name
    other_inside={
        "attention.q_proj.": "attn.q.",
        "attention.k_proj.": "attn.k.",
        "attention.v_proj.": "attn.v.",
        "attention.o_proj.": "attn.proj.",
        "mlp.": "mlp.",
    },
)
_UNUSED = ("pooler.", "embeddings.mask_token", "decoder.")
_GELUS: dict[str, Gelu] = {
    "gelu": "erf",
    "gelu_python": "erf",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_python_tanh": "tanh",
    "gelu_accurate": "tanh",
}
_DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "num_attention_heads": 12, "num_channels": 3}  # ViTConfig's
_BILINEAR, _BICUBIC = 2, 3  # PIL's numbers, as in preprocessor_config.json


def is_transformers_state(names: Collection[str]) -> bool:
    """True for the names of transformers' ViT, with or without a classifier."""
    return any(name.removeprefix("vit.") == "embeddings.patch_embeddings.projection.weight" for name in names)


def read_transformers_state(state: Mapping[str, Tensor], *, config: ModelConfig | None, origin: str) -> ExternalModel:
    """Read a state dict without its `config.json`; ValueError if it is incomplete or needs a `config`."""
    semantics = Semantics(gelu="erf", layer_norm_eps=1e-12, interpolation="timm")
    external = _read(state, semantics=semantics, config=config, origin=origin)
    found = external.config
    assumed = (
        f"without config.json beside it the file tells neither GELU nor epsilon nor pixels: taken as GELU "
        f"{found.gelu}, epsilon {found.layer_norm_eps:g}, pixels (x - 0.5) / 0.5"
    )
    return replace(external, notes=(*external.notes, assumed))


def read_transformers_folder(folder: Path, *, content: dict[str, Any], config: ModelConfig | None) -> ExternalModel:
    """Read a folder, `content` being its `config.json`; ValueError if files are broken or our models lack its parts."""
    from shardvit.model.positions.embedding import without_numbers

    origin = str(folder)
    content = _DEFAULTS | content
    activation = content["hidden_act"]
    if activation not in _GELUS:
        raise ValueError(f"{origin}: config.json has hidden_act {activation!r}; we build {', '.join(_GELUS)} only")
    for key in ("image_size", "patch_size"):
        value = content.get(key)
        if isinstance(value, list) and len(set(value)) != 1:
            raise ValueError(f"{origin}: config.json has {key} {value}; we build models of square images only")
    record = read_side_record(folder / WEIGHTS_FILE)
    semantics = Semantics(
        gelu=_GELUS[activation],
        layer_norm_eps=float(content["layer_norm_eps"]),
        interpolation=record.model.interpolation if record else "timm",  # config.json cannot hold it
        heads=int(content["num_attention_heads"]),
        position=record.model.position if record else None,  # nor for these
        class_token_position=record.model.class_token_position if record else None,
    )
    external = _read(load_folder_weights(folder), semantics=semantics, config=config, origin=origin)
    if content["num_channels"] != (found := external.config.channels):
        raise ValueError(
            f"{origin}: config.json has num_channels {content['num_channels']}, and its weights have {found}"
        )
    changes: dict[str, Any] = {
        "format": "transformers folder",
        "state": without_numbers(external.state, config=external.config, image_size=external.image_size),
    }
    names = content.get("id2label") or {}
    if len(names) == external.num_classes and all(str(index) in names for index in range(len(names))):
        changes["class_names"] = tuple(str(names[str(index)]) for index in range(len(names)))
    notes = list(external.notes)
    changes |= _pixels(folder, record=record, notes=notes)
    return replace(external, **changes, notes=tuple(notes))


def transformers_objection(meta: SavedModelMeta) -> str | None:
    """Why transformers' own ViT cannot hold this model, or None."""
    if meta.head != "linear":
        return f"its head is {meta.head}, and transformers' ViT has a linear one"
    return plain_vit_objection(meta.model, whose="transformers' ViT")


def write_transformers_folder(
    folder: Path,
    state: Mapping[str, Tensor],
    *,
    meta: SavedModelMeta,
    weights: str = WEIGHTS_FILE,
    more: Mapping[str, Any] = {},
) -> None:
    """Write the three files, adding keys `more` to `config.json`; `transformers_objection(meta)` must be None."""
    write_safetensors(folder / weights, _to_transformers(with_all_positions(state, meta=meta)))
    write_json(folder / PREPROCESSOR_FILE, _preprocessor_json(meta))
    with replaced_file(folder / CONFIG_FILE) as new:
        write_json(new, {**_config_json(meta), **more})


def _read(
    state: Mapping[str, Tensor], *, semantics: Semantics, config: ModelConfig | None, origin: str
) -> ExternalModel:
    import torch

    bare = {name.removeprefix("vit."): value for name, value in state.items()}
    unused = sorted(name for name in bare if name.startswith(_UNUSED))
    renamed = {_NAMES.ours(name): value for name, value in bare.items() if name not in unused}
    for name in [name for name in renamed if ".attn.q." in name]:
        parts = [name.replace(".q.", f".{part}.") for part in "qkv"]
        if all(part in renamed for part in parts):
            renamed[name.replace(".q.", ".qkv.")] = torch.cat([renamed.pop(part) for part in parts])
    notes = [f"{', '.join(unused)}: left out, classification does not use them"] if unused else []
    notes += add_qkv_biases(renamed)
    external = of_shapes(renamed, format="transformers state dict", semantics=semantics, given=config, origin=origin)
    return replace(external, notes=(*notes, *external.notes))


def _to_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for name, value in state.items():
        parts = [name.replace(".qkv.", f".{part}.") for part in "qkv"] if ".qkv." in name else [name]
        for part, rows in zip(parts, value.detach().cpu().chunk(len(parts)), strict=True):
            theirs = _NAMES.theirs(part)
            renamed[theirs if name.startswith("head.") else f"vit.{theirs}"] = rows.clone()
    return renamed


def _config_json(meta: SavedModelMeta) -> dict[str, Any]:
    sizes = meta.model.sizes
    names = dict(enumerate(meta.class_names))
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": MODEL_TYPE,
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.depth,
        "num_attention_heads": sizes.heads,
        "intermediate_size": sizes.mlp_dim,
        "hidden_act": "gelu_pytorch_tanh" if meta.model.gelu == "tanh" else "gelu",
        "layer_norm_eps": meta.model.layer_norm_eps,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "image_size": meta.image_size,
        "patch_size": sizes.patch_size,
        "num_channels": meta.model.channels,
        "qkv_bias": True,
        "id2label": {str(index): name for index, name in names.items()},
        "label2id": {name: index for index, name in names.items()},
    }


def _preprocessor_json(meta: SavedModelMeta) -> dict[str, Any]:
    """ViTImageProcessor squashes to the square; CLIPImageProcessor resizes and crops."""
    side = {"height": meta.image_size, "width": meta.image_size}
    common = {
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(meta.mean),
        "image_std": list(meta.std),
    }
    if meta.eval_protocol in ("vit", "vit_exact"):
        return {"image_processor_type": "ViTImageProcessor", "size": side, "resample": _BILINEAR, **common}
    timms = meta.eval_protocol == "timm"
    edge = meta.image_size / (meta.eval_crop_share or (0.9 if timms else 224 / 256))
    return {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": math.floor(edge) if timms else round(edge)},
        "resample": _BICUBIC if timms else _BILINEAR,
        "do_center_crop": True,
        "crop_size": side,
        "do_convert_rgb": True,
        **common,
    }


def _pixels(folder: Path, *, record: SavedModelMeta | None, notes: list[str]) -> dict[str, Any]:
    """Mean, deviation and protocol from `preprocessor_config.json`, or from `record` if it wrote that file."""
    path = folder / PREPROCESSOR_FILE
    if not path.is_file():
        notes.append(
            f"{path.name} is missing: pixels are taken as (x - 0.5) / 0.5, which is ViTImageProcessor's default"
        )
        return {"mean": GOOGLE_MEAN, "std": GOOGLE_STD}
    content = read_json(path)
    if record and content == _preprocessor_json(record):
        return {name: getattr(record, name) for name in ("mean", "std", "loss", "eval_protocol", "eval_crop_share")}
    pixels: dict[str, Any] = {
        "mean": _by_channel(content.get("image_mean", GOOGLE_MEAN)),
        "std": _by_channel(content.get("image_std", GOOGLE_STD)),
    }
    if not content.get("do_normalize", True):
        pixels = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    resample = content.get("resample", _BILINEAR)
    size, crop = content.get("size"), content.get("crop_size")
    if content.get("do_center_crop") and isinstance(size, dict) and "shortest_edge" in size and isinstance(crop, dict):
        pixels["eval_protocol"] = "timm" if resample == _BICUBIC else "big_vision"
        pixels["eval_crop_share"] = _share(crop["height"], size["shortest_edge"])
    elif resample != _BILINEAR:
        notes.append(f"transformers squashes with PIL's kernel {resample}, here it is bilinear (protocol vit)")
    return pixels


def _by_channel(value: Any) -> tuple[Any, ...]:
    """Three values; transformers also takes one number for all channels."""
    return tuple(value) if isinstance(value, list | tuple) else (value,) * 3


def _share(side: int, edge: int) -> float:
    """Crop share for which `edge` is floor(side / share); the plain quotient may miss it by rounding."""
    share = min(1.0, side / edge)
    return share if math.floor(side / share) >= edge else math.nextafter(share, 0.0)

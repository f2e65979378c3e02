"""transformers' own ViT (`ViTForImageClassification`, not its TimmWrapper): a folder or bare weights, both ways.

A folder is `config.json`, `model.safetensors` and `preprocessor_config.json`. Tensors are named as on the Hub, which
every release reads: version 5 has other names inside and converts, both of which can be read here. Costs one copy of
the weights. It reads neither ViT's relatives (DeiT, BEiT, DINOv2) nor the tensors that classification does not use.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.config import ModelConfig
from model.differences import read_sizes, shapes_of
from model.formats.foreign import GOOGLE_MEAN, GOOGLE_STD, Foreign, Semantics, config_of
from model.formats.side_record import read_side_record
from model.formats.weights_file import load_folder_weights, read_json
from model.saved import CONFIG_FILE, WEIGHTS_FILE, SavedModelMeta
from model.vocabulary import Gelu

if TYPE_CHECKING:
    from torch import Tensor

PREPROCESSOR_FILE = "preprocessor_config.json"
MODEL_TYPE = "vit"

# theirs (without the "vit." of the classifier's trunk) -> ours; the rest of each name stays
_MODULES = {
    "embeddings.cls_token": "cls_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "layernorm": "norm",
    "classifier": "head",
}
_IN_BLOCKS = {
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "attention.attention.query": "attn.q",
    "attention.attention.key": "attn.k",
    "attention.attention.value": "attn.v",
    "attention.output.dense": "attn.proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}
_NEW_IN_BLOCKS = {  # inside version 5
    "attention.q_proj": "attn.q",
    "attention.k_proj": "attn.k",
    "attention.v_proj": "attn.v",
    "attention.o_proj": "attn.proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
_BLOCK = re.compile(r"(?:encoder\.layer|layers)\.(\d+)\.(.+)\.(weight|bias)")
_UNUSED = ("pooler.", "embeddings.mask_token", "decoder.")
_GELUS: dict[str, Gelu] = {
    "gelu": "erf",
    "gelu_python": "erf",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_python_tanh": "tanh",
    "gelu_accurate": "tanh",
}
# ViTConfig's own defaults, for what a config.json leaves out
_DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "num_attention_heads": 12, "num_channels": 3}
_BILINEAR, _BICUBIC = 2, 3  # PIL's numbers, which preprocessor_config.json has


def is_transformers_state(names: Collection[str]) -> bool:
    """Whether these are the names of transformers' ViT, with or without a classifier."""
    return any(name.removeprefix("vit.") == "embeddings.patch_embeddings.projection.weight" for name in names)


def read_transformers_state(state: Mapping[str, Tensor], *, config: ModelConfig | None, origin: str) -> Foreign:
    """A bare state dict of transformers' ViT, without its `config.json`.

    Raises:
        ValueError: it is incomplete, or does not tell what `config` must then say.
    """
    semantics = Semantics(gelu="erf", layer_norm_eps=1e-12, interpolation="timm")
    foreign = _read(state, semantics=semantics, config=config, origin=origin)
    found = foreign.config
    assumed = (
        f"without config.json beside it the file tells neither GELU nor epsilon nor pixels: taken as GELU "
        f"{found.gelu}, epsilon {found.layer_norm_eps:g}, pixels (x - 0.5) / 0.5"
    )
    return replace(foreign, notes=(*foreign.notes, assumed))


def read_transformers_folder(folder: Path, *, content: dict[str, Any], config: ModelConfig | None) -> Foreign:
    """A folder of transformers' ViT; `content` is its `config.json`.

    Raises:
        ValueError: its activation or images are of a kind that our models do not have, or files are missing or broken.
    """
    origin = str(folder)
    content = _DEFAULTS | content
    activation = content["hidden_act"]
    if activation not in _GELUS:
        raise ValueError(f"{origin}: config.json has hidden_act {activation!r}; we build {', '.join(_GELUS)} only")
    if content["num_channels"] != 3:
        raise ValueError(f"{origin}: config.json has num_channels {content['num_channels']}; we build RGB models only")
    for key in ("image_size", "patch_size"):
        value = content.get(key)
        if isinstance(value, list) and len(set(value)) != 1:
            raise ValueError(f"{origin}: config.json has {key} {value}; we build models of square images only")
    record = read_side_record(folder / WEIGHTS_FILE)
    semantics = Semantics(
        gelu=_GELUS[activation],
        layer_norm_eps=float(content["layer_norm_eps"]),
        interpolation=record.model.interpolation if record else "timm",  # config.json has no place for it
        heads=int(content["num_attention_heads"]),
    )
    foreign = _read(load_folder_weights(folder), semantics=semantics, config=config, origin=origin)
    changes: dict[str, Any] = {"format": "transformers folder"}
    names = content.get("id2label") or {}
    if len(names) == foreign.num_classes and all(str(index) in names for index in range(len(names))):
        changes["class_names"] = tuple(str(names[str(index)]) for index in range(len(names)))
    notes = list(foreign.notes)
    changes |= _pixels(folder, record=record, notes=notes)
    return replace(foreign, **changes, notes=tuple(notes))


def transformers_objection(meta: SavedModelMeta) -> str | None:
    """Why transformers' own ViT cannot hold this model; None: it can."""
    config = meta.model
    if config.kind == "resnet" or config.sizes.resnet_layers is not None:
        return "transformers' ViT is neither a hybrid nor a ResNet"
    if meta.head != "linear":
        return f"its head is {meta.head}, and transformers' ViT has a linear one"
    if config.pool != "cls":
        return f"transformers' ViT has no pooling {config.pool}, only the class token"
    if config.position != "learned_1d" or config.position_at != "stem":
        return f"transformers' ViT has no position embedding {config.position} at {config.position_at}"
    if config.layer_scale is not None:
        return "transformers' ViT has no layer scale"
    return None


def write_transformers_folder(folder: Path, state: Mapping[str, Tensor], *, meta: SavedModelMeta) -> None:
    """Write the three files into an empty `folder`; `transformers_objection(meta)` is None."""
    from safetensors.torch import save_file

    save_file(_to_transformers(state), folder / WEIGHTS_FILE, metadata={"format": "pt"})
    for name, content in ((CONFIG_FILE, _config_json(meta)), (PREPROCESSOR_FILE, _preprocessor_json(meta))):
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


def _read(state: Mapping[str, Tensor], *, semantics: Semantics, config: ModelConfig | None, origin: str) -> Foreign:
    import torch

    notes: list[str] = []
    renamed: dict[str, Tensor] = {}
    unused: list[str] = []
    for name, value in state.items():
        if name.removeprefix("vit.").startswith(_UNUSED):
            unused.append(name)
        else:
            renamed[_our_name(name)] = value
    if unused:
        notes.append(f"{', '.join(sorted(unused))}: left out, classification does not use them")
    for name in [name for name in renamed if name.endswith(".attn.q.weight")]:
        for leaf in ("weight", "bias"):
            parts = [name.replace(".q.weight", f".{part}.{leaf}") for part in "qkv"]
            if all(part in renamed for part in parts):
                renamed[name.replace(".q.weight", f".qkv.{leaf}")] = torch.cat([renamed.pop(part) for part in parts])
            elif leaf == "bias" and not any(part in renamed for part in parts):
                fused = renamed[name.replace(".q.", ".qkv.")]
                renamed[name.replace(".q.weight", ".qkv.bias")] = fused.new_zeros(fused.shape[0])
                if "q, k and v have no biases: they became zeros, which training would move" not in notes:
                    notes.append("q, k and v have no biases: they became zeros, which training would move")
    sizes = read_sizes(shapes_of(renamed), origin=origin)
    if sizes.grid_size is None:
        raise ValueError(f"{origin} has no embeddings.position_embeddings: it is incomplete")
    found, more = config_of(sizes, semantics=semantics, given=config, origin=origin)
    return Foreign(
        format="transformers state dict",
        state=renamed,
        config=found,
        image_size=sizes.grid_size * found.sizes.patch_size,
        num_classes=sizes.num_classes,
        head=sizes.head,
        notes=(*notes, *more),
    )


def _our_name(name: str) -> str:
    """transformers' name of a parameter -> ours; a name that is not theirs stays."""
    bare = name.removeprefix("vit.")
    block = _BLOCK.fullmatch(bare)
    if block:
        index, module, leaf = block.groups()
        ours = (_IN_BLOCKS | _NEW_IN_BLOCKS).get(module)
        return f"blocks.{index}.{ours}.{leaf}" if ours else name
    for theirs, ours in _MODULES.items():
        if bare == theirs or bare.startswith(f"{theirs}."):
            return f"{ours}{bare.removeprefix(theirs)}"
    return name


def _to_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our names -> those on the Hub; the fused q, k, v becomes three."""
    blocks = {ours: theirs for theirs, ours in _IN_BLOCKS.items()}
    renamed: dict[str, Tensor] = {}
    for name, value in state.items():
        value = value.detach().cpu()
        if name.startswith("blocks."):
            _, index, inside = name.split(".", 2)
            module, leaf = inside.rsplit(".", 1)
            modules = [f"attn.{part}" for part in "qkv"] if module == "attn.qkv" else [module]
            for part, rows in zip(modules, value.chunk(len(modules)), strict=True):
                renamed[f"vit.encoder.layer.{index}.{blocks[part]}.{leaf}"] = rows.contiguous().clone()
            continue
        theirs, ours = next(pair for pair in _MODULES.items() if name == pair[1] or name.startswith(f"{pair[1]}."))
        trunk = "" if theirs == "classifier" else "vit."
        renamed[f"{trunk}{theirs}{name.removeprefix(ours)}"] = value.contiguous()
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
        "num_channels": 3,
        "qkv_bias": True,
        "id2label": {str(index): name for index, name in names.items()},
        "label2id": {name: index for index, name in names.items()},
    }


def _preprocessor_json(meta: SavedModelMeta) -> dict[str, Any]:
    """ViTImageProcessor squashes to the square; CLIPImageProcessor, as old a class, resizes and crops."""
    side = {"height": meta.image_size, "width": meta.image_size}
    common = {
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(meta.mean),
        "image_std": list(meta.std),
    }
    if meta.eval_protocol == "vit":
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
    """Mean, deviation and evaluation protocol from `preprocessor_config.json`, or from `record` if it wrote that."""
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
    """transformers takes one number for all three channels, too."""
    return tuple(value) if isinstance(value, list | tuple) else (value,) * 3


def _share(side: int, edge: int) -> float:
    """The crop share by which `edge` is floor(side / share), which a plain quotient may miss by rounding."""
    share = min(1.0, side / edge)
    return share if math.floor(side / share) >= edge else math.nextafter(share, 0.0)

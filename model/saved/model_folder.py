"""A saved model: a folder with `model.safetensors` and `config.json`, or our record next to or inside another file.

`config.json` has our record under "shardvit". If timm can build the model, the rest serves
`timm.create_model("local-dir:FOLDER", pretrained=True)` and transformers' AutoModelForImageClassification, and fixed
positions are among the weights. If not, that part is left out and both refuse the folder (transformers would attach a
random head with only a warning). Costs one copy of the weights on disk; no pickle.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shardvit.model.config import DecoderConfig, ModelConfig
from shardvit.model.saved.atomic import replaced_folder
from shardvit.model.saved.timm_eva import eva_entry, eva_json, eva_objection, from_eva, to_eva
from shardvit.model.vocabulary import COLOUR_CHANNELS, EvalProtocol, HeadKind, LossKind, SelfSupervised

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer
    from torch import Tensor

    from shardvit.model.resnet import BitResnet

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
RECORD_KEY = "shardvit"

# Build the trunk; `model_args` overrides all their sizes. JSON cannot name SwiGLU's class.
_TIMM_ENTRY_POINT, _TIMM_SWIGLU = "vit_base_patch16_224", "vit_giant_patch14_dinov2"
_TIMM_DISTILLED = "deit_base_distilled_patch16_224"

# timm's terms for our evaluation protocols: kernel, crop share, crop mode.
_TIMM_EVALUATION: dict[EvalProtocol, tuple[str, float, str]] = {
    "vit": ("bilinear", 1.0, "squash"),  # whole image, squashed to the square
    "vit_exact": ("bilinear", 1.0, "squash"),  # timm antialiases
    "big_vision": ("bilinear", 0.875, "center"),
    "big_vision_exact": ("bilinear", 0.875, "center"),  # timm averages no areas
    "timm": ("bicubic", 0.9, "center"),
}


class SavedModelMeta(BaseModel):
    """The record: how to rebuild a model, feed it pixels, and read its outputs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal[1] = 1
    model: ModelConfig
    image_size: int = Field(gt=0)  # side in pixels, in training
    num_classes: int = Field(gt=0)
    class_names: tuple[str, ...]
    head: HeadKind | SelfSupervised  # or the self-supervised stage that it is of
    decoder: DecoderConfig | None = None  # of a masked autoencoder
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # per channel; pixels in [0, 1] become (x - mean) / std
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    # channels: read as they are in the file, x as shares of its type's range; None: as colours of 8 bits
    pixels: Literal["channels"] | None = None
    loss: LossKind = "softmax"  # probabilities: softmax of all logits, or sigmoid of each
    eval_protocol: EvalProtocol = "vit"  # resizing and cropping: `data_shards.images.transforms`
    eval_crop_share: float | None = Field(default=None, gt=0, le=1)
    ema_decay: float | None = Field(default=None, gt=0, lt=1)  # the weights are a moving average; None: as trained

    @property
    def has_classes(self) -> bool:
        return self.head in ("mlp", "linear")

    @property
    def class_head(self) -> HeadKind:
        """`head`, and linear for a model without classes."""
        return "mlp" if self.head == "mlp" else "linear"

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if len(self.class_names) != self.num_classes:
            raise ValueError(f"{len(self.class_names)} class_names for num_classes {self.num_classes}")
        self.model.grid_size(self.image_size)
        for name in ("mean", "std"):
            if len(getattr(self, name)) != self.model.channels:
                raise ValueError(f"{name} has {len(getattr(self, name))} values for {self.model.channels} channels")
        return self

    @property
    def raw_channels(self) -> int:
        """Channels that images have in their files; 0: any image, as three colours of 8 bits."""
        return self.model.channels if self.pixels or self.model.channels != COLOUR_CHANNELS else 0


def save_model(folder: Path, state_dict: Mapping[str, Tensor], *, meta: SavedModelMeta) -> None:
    """Write full tensors (any device, own dtypes) and `meta` atomically; call on one rank. ValueError if they do not
    fit or `folder` is no saved model, OSError if the disk fails; an earlier model then stays."""
    from shardvit.model.positions.embedding import fixed_numbers

    folder = Path(folder)
    check_state(
        state_dict, meta=meta, says="the state dict to be saved does not fit the model that its record describes"
    )
    if folder.exists() and not _may_be_replaced(folder):
        raise ValueError(f"{folder} exists and is not a saved model of shardvit: remove it or choose another folder")
    with replaced_folder(folder) as new:
        for_timm = timm_objection(meta) is None
        if for_timm:
            state_dict = _in_timms_names({**state_dict, **fixed_numbers(meta.model, image_size=meta.image_size)}, meta)
        write_safetensors(new / WEIGHTS_FILE, state_dict)
        write_json(new / CONFIG_FILE, (_timm_json(meta) if for_timm else {}) | record_json(meta))


def read_meta(folder: Path) -> SavedModelMeta:
    """Read a saved model's record without torch or timm; ValueError names a missing or invalid file."""
    try:
        return read_record(Path(folder) / CONFIG_FILE)
    except FileNotFoundError as missing:
        raise ValueError(f"{missing.filename} is missing: {folder} is not a saved model of shardvit") from None


def read_record(path: Path) -> SavedModelMeta:
    """Read the record under "shardvit" in a JSON file; FileNotFoundError, or ValueError naming an invalid file."""
    content = read_json(path)
    if RECORD_KEY not in content:
        raise ValueError(f"{path} has no key {RECORD_KEY!r}: the model was not saved by shardvit")
    try:
        return SavedModelMeta.model_validate(content[RECORD_KEY])
    except ValidationError as error:
        raise ValueError(f"{path}: {RECORD_KEY}.{first_mistake(error)}") from error


def first_mistake(error: ValidationError) -> str:
    """First error of a record, as "model.gelu: Input should be ..."."""
    first = error.errors(include_url=False)[0]
    return ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")]))


def load_model(folder: Path) -> tuple[SavedModelMeta, dict[str, Tensor]]:
    """Load record and weights (CPU, own dtypes). ValueError if a file is missing or broken, or they do not fit."""
    from shardvit.model.positions.embedding import without_numbers

    meta = read_meta(folder)
    path = Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        raise ValueError(f"{path} is missing: the saved model has no weights")
    state_dict = read_safetensors(path)
    if meta.model.distillation_token == "learned":
        state_dict = from_deit(state_dict)
    if meta.model.rope != "none":
        state_dict = from_eva(state_dict)
    state_dict = without_numbers(state_dict, config=meta.model, image_size=meta.image_size)
    check_state(state_dict, meta=meta, says=f"{path} does not fit the model that its record describes")
    return meta, state_dict


def build_from_saved(folder: Path) -> tuple[SavedModelMeta, VisionTransformer | BitResnet]:
    """Load and build a saved model: float32, on the CPU, in training mode."""
    meta, state_dict = load_model(folder)
    model = build_described(meta)
    model.load_state_dict(state_dict, strict=True)
    return meta, model


def build_described(meta: SavedModelMeta) -> VisionTransformer | BitResnet:
    """Build a record's model, with placeholder weights."""
    from shardvit.model.self_supervised.masked_autoencoder import build_masked_autoencoder
    from shardvit.model.self_supervised.masked_patch import build_masked_patch
    from shardvit.model.vit import build_model

    if meta.head == "masked_patch":
        return build_masked_patch(meta.model, image_size=meta.image_size)
    if meta.head == "masked_autoencoder":
        decoder = meta.decoder or DecoderConfig()
        return build_masked_autoencoder(meta.model, image_size=meta.image_size, decoder=decoder)
    return build_model(meta.model, image_size=meta.image_size, num_classes=meta.num_classes, head=meta.class_head)


def expected_shapes(meta: SavedModelMeta) -> dict[str, tuple[int, ...]]:
    """Name -> shape for a record's model; allocates no weights."""
    import torch

    from shardvit.model.saved.state_shapes import shapes_of

    with torch.device("meta"):
        return shapes_of(build_described(meta).state_dict())


def timm_objection(meta: SavedModelMeta) -> str | None:
    """Why timm cannot build this model with the same logits, or None."""
    config = meta.model.with_learned_positions
    if config.custom is not None:
        return "it is own code, which only shardvit with that file can build"
    if meta.head != "linear":
        return f"its head is {meta.head}, and timm knows linear heads only"
    if config.kind == "resnet":
        return "it is a pure ResNet, whose weight standardisation has another epsilon in timm"
    if config.sizes.resnet_layers is not None:
        return "it has a ResNet stem, whose weight standardisation and GroupNorm have other epsilons in timm"
    if config.rope != "none":
        return eva_objection(meta.model)
    if config.distillation_token == "learned" and (config.mlp != "gelu" or config.class_token_position == "none"):
        return "timm has a distillation token in DeiT alone, whose MLP has GELU and whose tokens all have positions"
    if config.position != "learned_1d" or config.position_at != "stem":
        return f"timm has no position embedding {config.position} at {config.position_at}"
    return None


def from_deit(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename timm's second head of a distilled model to ours."""
    return {re.sub(r"^head_dist\.", "head.dist.", name): each for name, each in state.items()}


def timm_norm_layer(config: ModelConfig) -> str | None:
    """Argument for `timm.create_model` if epsilon is not timm's 1e-6, which JSON cannot express."""
    eps, norm = config.layer_norm_eps, "torch.nn.LayerNorm" if config.norm == "layer" else "timm.layers.RmsNorm"
    return None if eps == 1e-6 else f"norm_layer=functools.partial({norm}, eps={eps:g})"


def _in_timms_names(state: dict[str, Tensor], meta: SavedModelMeta) -> dict[str, Tensor]:
    if meta.model.distillation_token == "learned":
        return {re.sub(r"^head\.dist\.", "head_dist.", name): each for name, each in state.items()}
    if meta.model.rope == "none":
        return state
    if meta.model.position == "none":  # which timm's models with RoPE know
        state.pop("pos_embed", None)
    return to_eva(state, config=meta.model)


def _timm_json(meta: SavedModelMeta) -> dict[str, Any]:
    from shardvit.model.vit import timm_arguments

    config = meta.model
    if config.rope != "none":
        arguments, entry = eva_json(config, image_size=meta.image_size), eva_entry(config)
    else:
        arguments = timm_arguments(config.with_learned_positions, image_size=meta.image_size)
        entry = _TIMM_ENTRY_POINT
        if config.distillation_token == "learned":
            entry = _TIMM_DISTILLED
            del arguments["reg_tokens"]  # it has the token of its own
        if config.mlp != "gelu":
            entry, arguments["init_values"] = _TIMM_SWIGLU, config.layer_scale  # it has one of its own
    if norm_layer := timm_norm_layer(meta.model):
        arguments["norm_layer"] = f"give {norm_layer}"  # unknown to timm, whose KeyError shows it
    kernel, share, mode = _TIMM_EVALUATION[meta.eval_protocol]
    return {
        "architecture": entry,
        # At the top level only: transformers passes num_classes to timm itself and crashes on a second in model_args.
        "num_classes": meta.num_classes,
        "num_features": meta.model.sizes.width,
        "global_pool": arguments["global_pool"],
        "label_names": list(meta.class_names),
        "model_args": arguments,
        "pretrained_cfg": {
            "tag": RECORD_KEY,
            "custom_load": False,
            "input_size": [meta.model.channels, meta.image_size, meta.image_size],
            "fixed_input_size": True,
            "num_classes": meta.num_classes,
            "pool_size": None,
            "interpolation": kernel,
            "crop_pct": meta.eval_crop_share or share,
            "crop_mode": mode,
            "mean": list(meta.mean),
            "std": list(meta.std),
            "first_conv": "patch_embed.proj",
            "classifier": ["head", "head_dist"] if config.distillation_token == "learned" else "head",
        },
    }


def check_state(state: Mapping[str, Tensor], *, meta: SavedModelMeta, says: str) -> None:
    """Raise ValueError unless names and shapes are those of `meta`'s model: `says`, the first difference, a table."""
    from shardvit.model.saved.state_shapes import describe_differences, first_difference, shapes_of

    found, expected = shapes_of(state), expected_shapes(meta)
    if expected != found:
        raise ValueError(f"{says}: {first_difference(found, expected)}\n{describe_differences(found, expected)}")


def write_safetensors(path: Path, state_dict: Mapping[str, Tensor]) -> None:
    """Write tensors from any device in their own dtypes; OSError if the disk fails."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state_dict.items()}
    try:
        # older releases of transformers refuse a file whose header does not say "pt" for PyTorch
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # only its text tells of a full disk
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read tensors onto the CPU; ValueError names the file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; FileNotFoundError, or ValueError, naming the file, if it is broken or no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write indented JSON, as timm and transformers do."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def record_json(meta: SavedModelMeta) -> dict[str, Any]:
    """The record under its key."""
    return {RECORD_KEY: meta.model_dump(mode="json", exclude_none=True)}


def side_path(file: Path) -> Path:
    """FILE.json, the record next to another project's file."""
    return file.with_name(f"{file.name}.json")


def write_side_record(file: Path, *, meta: SavedModelMeta) -> None:
    """Write the record to `side_path`."""
    write_json(side_path(file), record_json(meta))


def read_side_record(file: Path) -> SavedModelMeta | None:
    """Read the record next to `file`, if any; ValueError names a broken one."""
    path = side_path(file)
    try:
        return read_record(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is no record of shardvit ({error}): remove it, or bring the right one back") from None


def parse_inside(text: str | bytes | None, *, path: Path) -> SavedModelMeta:
    """Parse the record of the program `path`, which ValueErrors name."""
    if text is None:
        raise ValueError(f"{path} has no record of shardvit, which says what is fed to it: export it with shardvit")
    try:
        return SavedModelMeta.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(
            f"{path}: its record of shardvit is broken ({first_mistake(error)}): export it again"
        ) from None


def _may_be_replaced(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    try:
        return not any(folder.iterdir()) or bool(read_meta(folder))
    except ValueError:
        return False

"""A model's folder, a stage's result or an import's: `model.safetensors` and `config.json`.

`config.json` carries our own record under the key "shardvit". Where timm knows the model, the rest of it is what timm
and transformers read, so that these two need nothing of ours:
    timm.create_model("local-dir:FOLDER", pretrained=True)
    transformers.AutoModelForImageClassification.from_pretrained("FOLDER")
Otherwise that part is left out on purpose (transformers would load the trunk of a model with an MLP head and attach
a random head with no more than a warning), so both refuse the folder; `timm_objection` says why. Costs one copy of
the weights on disk. No pickle is written or read. It does not keep dropout or optimiser state.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from model.config import ModelConfig
from model.replacing import replaced_folder
from model.vocabulary import EvalProtocol, HeadKind, LossKind

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer
    from torch import Tensor

    from model.resnet.bit import BitResnet

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
RECORD_KEY = "shardvit"

# The entry point through which timm builds the trunk; every size it fixes is overridden by `model_args`.
_TIMM_ENTRY_POINT = "vit_base_patch16_224"


class SavedModelMeta(BaseModel):
    """All that is needed to rebuild a saved model and to feed it pixels, and what its numbers mean.

    Attributes:
        model: the trunk.
        image_size: side in pixels of the images it was trained on.
        num_classes: outputs of the head.
        class_names: name of each output, in order.
        head: "mlp" or "linear"; "masked_patch" is that of the self-supervised stage.
        mean, std: pixels in [0, 1] become (x - mean) / std, channel by channel.
        loss: that it was trained with: probabilities are logits' softmax, or each logit's sigmoid.
        eval_protocol, eval_crop_share: what is shown to it of an image (see `data_shards.images.transforms`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal[2] = 2
    model: ModelConfig
    image_size: int = Field(gt=0)
    num_classes: int = Field(gt=0)
    class_names: tuple[str, ...]
    head: HeadKind | Literal["masked_patch"]
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    loss: LossKind = "softmax"
    eval_protocol: EvalProtocol = "vit"
    eval_crop_share: float | None = Field(default=None, gt=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _of_version_1(cls, record: object) -> object:
        """The first records had these at the top, at the only values there were."""
        if isinstance(record, dict) and record.get("format_version") == 1:
            fixed = {"gelu": "tanh", "layer_norm_eps": 1e-6, "pos_embed_interpolation": "bilinear_align_corners"}
            same = {key: value for key, value in record.items() if fixed.get(key) != value}
            return {**same, "format_version": 2}
        return record

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if len(self.class_names) != self.num_classes:
            raise ValueError(f"{len(self.class_names)} class_names for num_classes {self.num_classes}")
        self.model.grid_size(self.image_size)
        return self


def save_model(folder: Path, state_dict: Mapping[str, Tensor], *, meta: SavedModelMeta) -> None:
    """Write `state_dict` (full tensors, on any device, each in its own dtype) and `meta` to `folder`.

    An earlier result at that place is replaced, and stays until the new one is whole (`replaced_folder`). One process
    calls this, not every rank.

    Raises:
        ValueError: the state dict is not that of the model which `meta` describes, or something else than a
            saved model is at `folder` (nothing is overwritten then).
        OSError: the disk is full or cannot be written; what was there stays.
    """
    folder = Path(folder)
    _check_state(state_dict, meta=meta, origin="the state dict to be saved")
    if folder.exists() and not _may_be_replaced(folder):
        raise ValueError(f"{folder} exists and is not a saved model of shardvit: remove it or choose another folder")
    with replaced_folder(folder) as beside:
        _write_weights(beside / WEIGHTS_FILE, state_dict)
        (beside / CONFIG_FILE).write_text(
            json.dumps(_config_json(meta), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def read_meta(folder: Path) -> SavedModelMeta:
    """The record of a saved model; reads `config.json` only and imports neither torch nor timm.

    Raises:
        ValueError: the file is missing, is not JSON, or holds no valid record; the message names it.
    """
    path = Path(folder) / CONFIG_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: {folder} is not a saved model of shardvit") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or RECORD_KEY not in content:
        raise ValueError(f"{path} has no key {RECORD_KEY!r}: the model was not saved by shardvit")
    try:
        return SavedModelMeta.model_validate(content[RECORD_KEY])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join([RECORD_KEY, *map(str, first["loc"])])
        raise ValueError(f"{path}: {where}: {first['msg']}") from error


def load_model(folder: Path) -> tuple[SavedModelMeta, dict[str, Tensor]]:
    """The record and the weights (on the CPU, in the dtypes they were saved in) of a saved model.

    Raises:
        ValueError: a file is missing or broken, or the weights are not those of the model in the record.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    meta = read_meta(folder)
    path = Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        raise ValueError(f"{path} is missing: the saved model has no weights")
    try:
        state_dict = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
    _check_state(state_dict, meta=meta, origin=str(path))
    return meta, state_dict


def build_from_saved(folder: Path) -> tuple[SavedModelMeta, VisionTransformer | BitResnet]:
    """Load a saved model and build it, in float32 on the CPU and in training mode, as `build_model` gives it.

    Raises:
        ValueError: as `load_model`.
    """
    meta, state_dict = load_model(folder)
    model = build_described(meta)
    model.load_state_dict(state_dict, strict=True)
    return meta, model


def build_described(meta: SavedModelMeta) -> VisionTransformer | BitResnet:
    """The model that a record describes, with placeholder weights."""
    from model.build import build_model
    from model.masked_patch import build_masked_patch

    if meta.head == "masked_patch":
        return build_masked_patch(meta.model, image_size=meta.image_size)
    return build_model(meta.model, image_size=meta.image_size, num_classes=meta.num_classes, head=meta.head)


def expected_shapes(meta: SavedModelMeta) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each tensor of the model that a record describes (built without memory)."""
    import torch

    from model.differences import shapes_of

    with torch.device("meta"):
        return shapes_of(build_described(meta).state_dict())


def timm_objection(meta: SavedModelMeta) -> str | None:
    """Why timm cannot build this model with the same logits; None: it can."""
    config = meta.model
    if meta.head != "linear":
        return f"its head is {meta.head}, and timm knows linear heads only"
    if config.kind == "resnet":
        return "it is a pure ResNet, whose weight standardisation has another epsilon in timm"
    if config.sizes.resnet_layers is not None:
        return "it has a ResNet stem, whose weight standardisation and GroupNorm have other epsilons in timm"
    if config.position != "learned_1d" or config.position_at != "stem":
        return f"timm has no position embedding {config.position} at {config.position_at}"
    if config.layer_norm_eps != 1e-6:
        return f"its LayerNorm epsilon is {config.layer_norm_eps:g}, and timm's is 1e-6"
    return None


def _config_json(meta: SavedModelMeta) -> dict[str, Any]:
    """The content of `config.json`."""
    record = {RECORD_KEY: meta.model_dump(mode="json", exclude_none=True)}
    if timm_objection(meta) is not None:
        return record

    from model.vit import timm_arguments

    image_shape = [3, meta.image_size, meta.image_size]
    return {
        "architecture": _TIMM_ENTRY_POINT,
        # At the top level only: transformers passes num_classes to timm itself and crashes when model_args
        # holds a second.
        "num_classes": meta.num_classes,
        "num_features": meta.model.sizes.width,
        "global_pool": timm_arguments(meta.model, image_size=meta.image_size)["global_pool"],
        "label_names": list(meta.class_names),
        "model_args": timm_arguments(meta.model, image_size=meta.image_size),
        "pretrained_cfg": {
            "tag": RECORD_KEY,
            "custom_load": False,
            "input_size": image_shape,
            "fixed_input_size": True,
            "num_classes": meta.num_classes,
            "pool_size": None,
            **_timm_evaluation(meta),
            "mean": list(meta.mean),
            "std": list(meta.std),
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
        **record,
    }


def _timm_evaluation(meta: SavedModelMeta) -> dict[str, Any]:
    """What `timm.data.resolve_model_data_config` reads."""
    match meta.eval_protocol:
        case "vit":  # the whole image squashed to the square, no crop
            return {"interpolation": "bilinear", "crop_pct": 1.0, "crop_mode": "squash"}
        case "big_vision":
            return {"interpolation": "bilinear", "crop_pct": meta.eval_crop_share or 0.875, "crop_mode": "center"}
        case "timm":
            return {"interpolation": "bicubic", "crop_pct": meta.eval_crop_share or 0.9, "crop_mode": "center"}


def _check_state(state_dict: Mapping[str, Tensor], *, meta: SavedModelMeta, origin: str) -> None:
    """Refuse weights whose names or shapes are not those of the model in `meta` (built without memory)."""
    from model.differences import describe_differences, shapes_of

    expected, found = expected_shapes(meta), shapes_of(state_dict)
    if expected == found:
        return
    name = sorted(name for name in expected | found if expected.get(name) != found.get(name))[0]
    if name not in found:
        problem = f"{name!r} is missing"
    elif name not in expected:
        problem = f"{name!r} does not belong to it"
    else:
        problem = f"{name!r} has the shape {found[name]} instead of {expected[name]}"
    table = describe_differences(found, expected)
    raise ValueError(f"{origin} does not fit the model that its record describes: {problem}\n{table}")


def _write_weights(path: Path, state_dict: Mapping[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state_dict.items()}
    try:
        # older releases of transformers refuse a file whose header does not say "pt" for PyTorch
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # its only sign of a full disk is this text
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _may_be_replaced(folder: Path) -> bool:
    """Whether `folder` is empty or a saved model of ours."""
    if not folder.is_dir():
        return False
    if not any(folder.iterdir()):
        return True
    try:
        read_meta(folder)
    except ValueError:
        return False
    return True

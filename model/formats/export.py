"""Write a model in another project's format, for people without shardvit.

Our record goes next to the file (FILE.json) or inside (ONNX, torch.export). An export computes the model's logits, or
the notes say what to change; models that a format cannot hold are refused. To add a format: its name in
`model/vocabulary.py`, and a case in each `match` here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from shardvit.model.formats.torchvision_state import how_to_load, torchvision_objection, write_torchvision_state
from shardvit.model.formats.transformers_state import transformers_objection, write_transformers_folder
from shardvit.model.saved.atomic import replaced_file, replaced_folder
from shardvit.model.saved.model_folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    SavedModelMeta,
    build_described,
    check_state,
    read_json,
    read_side_record,
    save_model,
    side_path,
    timm_norm_layer,
    timm_objection,
    write_side_record,
)
from shardvit.model.vocabulary import ExportFormat, check_ending

if TYPE_CHECKING:
    from torch import Tensor


def export_model(meta: SavedModelMeta, state: Mapping[str, Tensor], *, to: ExportFormat, out: Path) -> list[str]:
    """Write the model that `meta` describes, from its full state dict, to `out`; returns notes for the user.

    npz (vision_transformer's names) and big_vision: Google's npz. timm: a folder for timm and, by its TimmWrapper,
    transformers. transformers: a folder for its own ViT. torchvision: a state dict. onnx and torch_export: programs for
    any batch size. Replaces an earlier file; a folder must be empty or an earlier export. ValueError, before writing,
    if the format cannot hold the model, the weights do not fit `meta`, or `out` has another ending or kind.
    """
    out = Path(out)
    if to not in get_args(ExportFormat):
        raise ValueError(f"there is no format {to!r}: take one of {', '.join(get_args(ExportFormat))}")
    if objection := export_objection(meta, to=to):
        raise ValueError(f"{to} cannot hold this model: {objection}")
    check_state(state, meta=meta, says="the weights do not fit the model that its record describes")
    check_ending(out, to=to)
    is_foreign = out.exists() and (
        not out.is_dir() or (any(out.iterdir()) and read_side_record(out / WEIGHTS_FILE) is None)
    )
    if to == "transformers" and is_foreign:
        raise ValueError(f"{out} exists and is no earlier {to} export: remove it or choose another name")
    return _write(meta, state, to=to, out=out)


def _write(meta: SavedModelMeta, state: Mapping[str, Tensor], *, to: ExportFormat, out: Path) -> list[str]:
    beside = f"in {side_path(out).name}: keep the two together"
    match to:
        case "npz" | "big_vision":
            from shardvit.model.formats.google_npz import write_google_npz

            write_google_npz(out, state, meta=meta, names="vision_transformer" if to == "npz" else "big_vision")
            return [f"class names and preprocessing are {beside}"]
        case "timm":
            save_model(out, state, meta=meta)
            more = f", {norm_layer}" if (norm_layer := timm_norm_layer(meta.model)) else ""
            return [f'load it with timm.create_model("local-dir:{out}", pretrained=True{more})']
        case "transformers":
            with replaced_folder(out) as new:
                write_transformers_folder(new, state, meta=meta)
                write_side_record(new / WEIGHTS_FILE, meta=meta)
            notes = [
                f"load it with AutoModelForImageClassification and AutoImageProcessor, .from_pretrained({str(out)!r})"
            ]
            if double := sorted({name for name in meta.class_names if meta.class_names.count(name) > 1}):
                notes.append(f"label2id keeps one class only of each name that several have: {', '.join(double)}")
            return notes
        case "torchvision":
            with replaced_file(out) as new:
                write_torchvision_state(new, state, meta=meta)
                write_side_record(new, meta=meta)
            notes = [f"class names, preprocessing and GELU are {beside}"]
            if meta.model.gelu == "tanh":
                notes.append(
                    "torchvision's class has GELU in the erf form, this model the tanh form: the last two lines swap it"
                )
            return [*notes, "\n".join(["load it with", *how_to_load(meta, file=out)]), _pixels(meta)]
        case "onnx" | "torch_export":
            from shardvit.model.formats import programs

            model = build_described(meta)
            model.load_state_dict(state, strict=True)
            write = programs.write_onnx if to == "onnx" else programs.write_torch_export
            write(out, model.eval(), meta=meta)
            return [_pixels(meta)]


def save_for_others(folder: Path, state: Mapping[str, Tensor], *, meta: SavedModelMeta) -> None:
    """Save as `save_model`, plus transformers' files (twice the size) if timm would use another LayerNorm epsilon."""
    save_model(folder, state, meta=meta)
    if timm_norm_layer(meta.model) and not transformers_objection(meta):
        own = "transformers.safetensors"
        more = {"transformers_weights": own, **read_json(folder / CONFIG_FILE)}
        write_transformers_folder(folder, state, meta=meta, weights=own, more=more)


def formats_of(meta: SavedModelMeta) -> tuple[list[ExportFormat], dict[ExportFormat, str]]:
    """The formats that can hold this model, and why the others cannot."""
    found = {to: export_objection(meta, to=to) for to in get_args(ExportFormat)}
    return [to for to, objection in found.items() if not objection], {to: why for to, why in found.items() if why}


def export_objection(meta: SavedModelMeta, *, to: ExportFormat) -> str | None:
    """Why a format cannot hold this model with the same logits, or None."""
    if not meta.has_classes:
        return f"it is of the {meta.head.replace('_', '-')} stage and has no classes yet: fine-tune it first"
    if meta.model.custom is not None:
        return "it is own code, which no other program can build: its weights are in model.safetensors"
    match to:
        case "npz" | "big_vision":
            return _npz_objection(meta, to=to)
        case "timm":
            return timm_objection(meta)
        case "transformers":
            return transformers_objection(meta)
        case "torchvision":
            return torchvision_objection(meta)
        case "onnx" | "torch_export":
            return None


def _npz_objection(meta: SavedModelMeta, *, to: Literal["npz", "big_vision"]) -> str | None:
    config = meta.model
    if config.kind == "resnet":
        return "it is a pure ResNet, and these are names of Vision Transformers"
    if config.gelu != "tanh":
        return f"its GELU is the {config.gelu} form, and Google's is tanh"
    if config.layer_norm_eps != 1e-6:
        return f"its LayerNorm epsilon is {config.layer_norm_eps:g}, and Google's is 1e-06"
    if config.layer_scale is not None:
        return "it has layer scale, and Google's models have none"
    if config.later_blocks:
        return f"it has {config.later_blocks}, and Google's models have none"
    if config.with_learned_positions.position != "learned_1d" or config.position_at != "stem":
        return f"its position embedding is {config.position} at {config.position_at}, and theirs is learned_1d at stem"
    if to == "npz" and config.pool == "map":
        return "it pools by attention (map), for which only big_vision has names"
    if to == "big_vision" and config.sizes.resnet_layers is not None:
        return "it has a ResNet stem, for which only vision_transformer has names"
    return None


def _pixels(meta: SavedModelMeta) -> str:
    mean, std = (f"({', '.join(f'{value:g}' for value in values)})" for values in (meta.mean, meta.std))
    kind = "RGB" if meta.raw_channels == 0 else f"{meta.raw_channels}-channel"
    return (
        f"it takes {kind} squares of {meta.image_size} pixels, (x - {mean}) / {std} with x from 0 to 1, prepared by "
        f"the evaluation protocol {meta.eval_protocol}"
    )

"""Detect the format of a file or folder of weights, and read it.

A file's tensor names decide, not its own name; a folder's `config.json` does. Our record next to a file (FILE.json) is
trusted. Costs one copy of the weights. ONNX files are refused. To add a format: a reader that returns an
`ExternalModel`, and a case here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardvit.model.config import OF_TRANSFORMERS, ModelConfig
from shardvit.model.formats.external_model import (
    NO_HINTS,
    ExternalModel,
    UserHints,
    adapt,
    lost_blocks,
    of_record,
    settle,
)
from shardvit.model.formats.timm_state import is_timm_state, read_timm_folder, read_timm_state
from shardvit.model.formats.torchvision_state import is_torchvision_state, read_torchvision_state
from shardvit.model.formats.transformers_state import (
    MODEL_TYPE,
    is_transformers_state,
    read_transformers_folder,
    read_transformers_state,
)
from shardvit.model.formats.weights_file import FOLDER_FILES, SUFFIXES, load_weights
from shardvit.model.saved.model_folder import (
    CONFIG_FILE,
    RECORD_KEY,
    SavedModelMeta,
    load_model,
    read_json,
    read_side_record,
)

if TYPE_CHECKING:
    from torch import Tensor


def import_file(
    path: Path,
    *,
    config: ModelConfig | None = None,
    image_size: int | None = None,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
) -> tuple[SavedModelMeta, dict[str, Tensor]]:
    """Read any file or folder and adapt it; errors as in `read_external` and `adapt`."""
    external = read_external(path, config=config)
    return adapt(external, image_size=image_size, num_classes=num_classes, class_names=class_names)


def read_external(path: Path, *, config: ModelConfig | None = None, hints: UserHints = NO_HINTS) -> ExternalModel:
    """Read the model in a file or folder, under our names; `config` and `hints` supply what the file does not tell.

    Reads folders of ours, timm and transformers, Google's npz, and safetensors or torch files with a state dict of
    timm, transformers or torchvision. ValueError if it is missing, unreadable, or contradicts `config`.
    """
    path = Path(path)
    if config is not None and config.kind == "vit":
        positions = {"sincos_2d": "sincos_2d", "none": "none"}
        hints = replace(hints, depth=config.sizes.depth, position=positions.get(config.position))
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if path.name in FOLDER_FILES and (path.parent / CONFIG_FILE).is_file():
        path = path.parent
    if path.is_dir():
        found = _folder(path, config=config)
    elif path.suffix == ".npz":
        from shardvit.model.formats.google_npz import read_google_npz

        found = _settled(read_google_npz(path, hints=hints), config=config, origin=str(path))
    elif path.suffix == ".pt2":
        from shardvit.model.formats.programs import read_torch_export

        described = of_record(*read_torch_export(path), format="torch.export file")
        found = _settled(described, config=config, origin=str(path))
    elif path.suffix == ".onnx":
        raise ValueError(f"{path} is a program without named weights: import the model that it was exported from")
    elif path.suffix in SUFFIXES:
        found = _bare(path, config=config, hints=hints)
    else:
        raise ValueError(
            f"{path} is of no kind that can be imported: looked for a folder with config.json, or a file .npz, .pt2, "
            f"{', '.join(SUFFIXES)}"
        )
    return found.with_every_channel().with_loss(hints.loss)


def _folder(folder: Path, *, config: ModelConfig | None) -> ExternalModel:
    if (folder / "recipe.yaml").is_file():
        raise ValueError(f"{folder} is a run's folder: give a stage's model, {folder}/STAGE/model")
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(
            f"{folder} has no config.json: looked for a model saved by shardvit, timm or transformers; for a file in "
            "it give the file's path"
        )
    content = read_json(folder / CONFIG_FILE)
    if RECORD_KEY in content:
        meta, state = load_model(folder)
        return _settled(of_record(meta, state, format="model saved by shardvit"), config=config, origin=str(folder))
    if content.get("model_type") == MODEL_TYPE:
        return read_transformers_folder(folder, content=content, config=config)
    if "architecture" in content:
        return read_timm_folder(folder, content=content, config=config)
    raise ValueError(
        f"{folder / CONFIG_FILE} has neither the key {RECORD_KEY!r} (shardvit), nor model_type {MODEL_TYPE!r} "
        f"(transformers; it is {content.get('model_type')!r}), nor architecture (timm): we build no such model"
    )


def _bare(path: Path, *, config: ModelConfig | None, hints: UserHints) -> ExternalModel:
    state, origin = load_weights(path), str(path)
    for belongs, read in (
        (is_torchvision_state, read_torchvision_state),
        (is_transformers_state, read_transformers_state),
        (is_timm_state, read_timm_state),
    ):
        if belongs(state):
            meta = read_side_record(path)
            if meta is None:
                external = read(state, config=config, origin=origin)
                if hints.depth is None and (lost := lost_blocks(external.config.sizes)):
                    raise ValueError(f"{origin} {lost}")
                return external
            if belongs is is_timm_state:  # our own names: any of our models, also those that timm cannot build
                described = of_record(meta, state, format="state dict under our names")
            else:
                external = read(state, config=meta.model, origin=origin)
                described = of_record(meta, external.state, format=external.format)
            return _settled(described, config=config, origin=origin)
    raise ValueError(
        f"{path} has tensors such as {', '.join(sorted(state)[:3])}: looked for the names of timm (blocks.0.*, "
        "patch_embed.proj.weight), transformers (vit.embeddings.*) and torchvision (class_token, encoder.layers.*)"
    )


def _settled(external: ExternalModel, *, config: ModelConfig | None, origin: str) -> ExternalModel:
    if config is None:
        return external
    found = external.config
    of_file = {name: getattr(found, name) for name in OF_TRANSFORMERS} if found.kind == "vit" else {}
    heads = found.sizes.heads if found.kind == "vit" else None
    settled, notes = settle(config, of_file=of_file, heads=heads, kind=found.kind, origin=origin)
    image_size = external.image_size
    if found.kind == "vit":  # the weights determine the grid; other patch sizes are found later
        image_size = image_size // found.sizes.patch_size * settled.sizes.patch_size
    return replace(external, config=settled, image_size=image_size, notes=(*external.notes, *notes))

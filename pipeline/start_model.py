"""The model that swap_head starts from: an earlier stage's, or a folder that the recipe names. No torch here, so that
`launch` asks before it starts any process."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from data_shards.errors import UserError
from model.config import ModelConfig
from model.saved import CONFIG_FILE, WEIGHTS_FILE, read_meta
from pipeline.recipe.schema import Recipe


def model_from_elsewhere(recipe: Recipe) -> Path | None:
    """The folder that stages.swap_head.model names, relative to the working folder as shards are; None: it names none.

    Raises:
        UserError: the folder holds no model, or one that the recipe's cannot go on from; says what to change.
    """
    config = recipe.stages.swap_head
    if config is None or config.model is None:
        return None
    folder = Path(config.model)
    if folder.is_file():
        raise UserError(f"stages.swap_head.model: {folder} is a file: {_advice(folder)}")
    try:
        meta = read_meta(folder)
    except ValueError as error:
        advice = f"; if it is another program's: {_advice(folder)}" if (folder / CONFIG_FILE).is_file() else ""
        raise UserError(f"stages.swap_head.model: {error}{advice}") from None
    theirs, ours = _resolved(meta.model), _resolved(recipe.model)
    different = [key for key in theirs | ours if theirs.get(key) != ours.get(key)]
    if different:
        shown = ", ".join(f"{key} {theirs.get(key)} (not {ours.get(key)})" for key in different)
        raise UserError(
            f"stages.swap_head.model: {folder} is another model than the recipe's; under model, set {shown}"
        )
    if not (folder / WEIGHTS_FILE).is_file():
        raise UserError(f"stages.swap_head.model: {folder / WEIGHTS_FILE} is missing: the model has no weights")
    finetune = recipe.stages.finetune
    assert finetune is not None  # held by the recipe's validator
    if meta.model.position == "relative" and meta.image_size != finetune.image_size:
        raise UserError(
            f"stages.finetune.image_size: relative positions are not defined at another resolution than they were "
            f"learnt at, and {folder} is of {meta.image_size} px: take {meta.image_size}, not {finetune.image_size}"
        )
    return folder


def _advice(theirs: Path) -> str:
    return f"make a model of it with `shardvit import {theirs} FOLDER` and name that folder"


def _resolved(config: ModelConfig) -> dict[str, object]:
    """What a configuration comes to, however it was written, under the recipe's keys."""
    match config.kind:
        case "vit":
            sizes = asdict(config.sizes)
        case "resnet":
            sizes = {"resnet_layers": config.resnet.layers, "resnet_width_factor": config.resnet.width_factor}
    return config.model_dump(exclude={"variant"}) | sizes

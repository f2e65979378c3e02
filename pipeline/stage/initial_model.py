"""Describe a stage's model before there are weights, and find the model that swap_head starts from. No torch here.

A stage writes its model's record into stage.json when it begins, so `predict` and `export` need no data. swap_head's
model is checked by `launch` before any process is started, and again by the stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from data_shards.errors import UserError
from data_shards.vocabulary import GOOGLES, Normalisation
from model.config import ModelConfig
from model.saved.model_folder import WEIGHTS_FILE, SavedModelMeta
from model.vocabulary import COLOURS, HeadKind
from pipeline.recipe.schema import Recipe
from pipeline.recipe.sources import record_elsewhere
from pipeline.recipe.stage import MaskedPatchStage
from pipeline.recipe.vocabulary import StageName

StageHead = HeadKind | Literal["masked_patch"]


@dataclass(frozen=True)
class StageStart:
    """A stage's model before its first step."""

    head: StageHead
    weights: str = "random"  # or the digest of the model it was loaded from
    normalisation: Normalisation = GOOGLES  # of its pixels


def stage_model(recipe: Recipe, *, stage: StageName, classes: Sequence[str], start: StageStart) -> SavedModelMeta:
    """The record of a training stage's model; `classes`: of the training set."""
    config = recipe.train_stage(stage)
    outputs = COLOURS if start.head == "masked_patch" else classes
    return SavedModelMeta(
        model=recipe.model,
        image_size=config.image_size,
        num_classes=len(outputs),
        class_names=tuple(outputs),
        head=start.head,
        mean=start.normalisation.mean,
        std=start.normalisation.std,
        loss=config.loss,
        eval_protocol=config.eval_protocol,
        eval_crop_share=config.eval_crop_share,
        ema_decay=config.ema.decay if config.ema and config.ema.model == "ema" else None,
    )


def model_to_come(recipe: Recipe, *, stage: StageName) -> SavedModelMeta:
    """The record that a training stage's model will have, except its classes and normalisation."""
    config = recipe.train_stage(stage)
    head: Any = "masked_patch" if isinstance(config, MaskedPatchStage) else getattr(config, "head", "linear")
    return stage_model(recipe, stage=stage, classes=["?"], start=StageStart(head))


def model_from_elsewhere(recipe: Recipe) -> Path | None:
    """The folder named by stages.swap_head.model, relative to the working folder, if any; UserError: it holds no model,
    or one that does not fit the recipe's."""
    config = recipe.stages.swap_head
    if config is None or config.model is None:
        return None
    folder = Path(config.model)
    meta = record_elsewhere(folder)
    theirs, ours = _resolved(meta.model), _resolved(recipe.model)
    different = [key for key in theirs | ours if theirs.get(key) != ours.get(key)]
    if different:
        shown = ", ".join(f"{key} {theirs.get(key)} (not {ours.get(key)})" for key in different)
        raise UserError(
            f"stages.swap_head.model: {folder} is another model than the recipe's; under model, set {shown}, or leave "
            "model out (model=null) to take the folder's"
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


def _resolved(config: ModelConfig) -> dict[str, object]:
    """A configuration's resolved values, under the recipe's keys."""
    match config.kind:
        case "vit":
            sizes = asdict(config.sizes)
        case "resnet":
            sizes = {"resnet_layers": config.resnet.layers, "resnet_width_factor": config.resnet.width_factor}
    return config.model_dump(exclude={"variant"}) | sizes

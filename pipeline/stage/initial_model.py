"""Describe a stage's model before it has weights, and find the model that swap_head starts from. No torch.

A stage starts by writing its model's record into stage.json, so `predict` and `export` need no data.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.vocabulary import GOOGLES, Normalisation
from shardvit.model.config import ModelConfig
from shardvit.model.saved.model_folder import WEIGHTS_FILE, SavedModelMeta
from shardvit.model.vocabulary import COLOURS
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.sources import record_elsewhere
from shardvit.pipeline.recipe.vocabulary import StageName


@dataclass(frozen=True)
class StageStart:
    """Starting point of a stage's model."""

    weights: str = "random"  # or the digest of the loaded model
    normalisation: Normalisation = GOOGLES  # of pixels


def stage_model(
    recipe: Recipe, *, stage: StageName, classes: Sequence[str] = ("?",), start: StageStart = StageStart()
) -> SavedModelMeta:
    """Make the record of a training stage's model; without `classes` and `start`, before its data are known."""
    config = recipe.train_stage(stage)
    outputs = COLOURS if config.head_kind == "masked_patch" else classes
    return SavedModelMeta(
        model=recipe.model,
        image_size=config.image_size,
        num_classes=len(outputs),
        class_names=tuple(outputs),
        head="linear" if recipe.model.custom else config.head_kind,
        mean=start.normalisation.mean,
        std=start.normalisation.std,
        loss=config.loss_kind,
        eval_protocol=config.eval_protocol,
        eval_crop_share=config.eval_crop_share,
        ema_decay=config.ema.decay if config.ema and config.ema.model == "ema" else None,
    )


def model_from_elsewhere(recipe: Recipe) -> Path | None:
    """Get the folder swap_head.model (relative to the working folder), if any; UserError if its model does not fit."""
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
    assert finetune is not None  # guaranteed by the recipe's validator
    if meta.model.position == "relative" and meta.image_size != finetune.image_size:
        raise UserError(
            f"stages.finetune.image_size: relative positions are undefined at another resolution than in training, and "
            f"{folder} is of {meta.image_size} px: take {meta.image_size}, not {finetune.image_size}"
        )
    return folder


def _resolved(config: ModelConfig) -> dict[str, object]:
    if config.custom is not None:
        return config.model_dump()
    match config.kind:
        case "vit":
            sizes = asdict(config.sizes)
        case "resnet":
            sizes = {"resnet_layers": config.resnet.layers, "resnet_width_factor": config.resnet.width_factor}
    return config.model_dump(exclude={"variant"}) | sizes

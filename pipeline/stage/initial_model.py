"""Describe a stage's model before there are weights, and find the model that swap_head starts from. No torch.

A stage writes its model's record into stage.json at its start, so `predict` and `export` need no data. `launch` checks
swap_head's model before it starts any process, the stage again.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from data_shards.errors import UserError
from data_shards.vocabulary import GOOGLES, Normalisation
from model.config import ModelConfig
from model.saved.model_folder import WEIGHTS_FILE, SavedModelMeta
from model.vocabulary import COLOURS
from pipeline.recipe.schema import Recipe
from pipeline.recipe.sources import record_elsewhere
from pipeline.recipe.vocabulary import StageName


@dataclass(frozen=True)
class StageStart:
    """What a stage's model starts from."""

    weights: str = "random"  # or the digest of the model it was loaded from
    normalisation: Normalisation = GOOGLES  # of its pixels


def stage_model(
    recipe: Recipe, *, stage: StageName, classes: Sequence[str] = ("?",), start: StageStart = StageStart()
) -> SavedModelMeta:
    """Make the record of a training stage's model; without `classes` (of the training set) and `start`: the model to
    come."""
    config = recipe.train_stage(stage)
    outputs = COLOURS if config.head_kind == "masked_patch" else classes
    return SavedModelMeta(
        model=recipe.model,
        image_size=config.image_size,
        num_classes=len(outputs),
        class_names=tuple(outputs),
        head=config.head_kind,
        mean=start.normalisation.mean,
        std=start.normalisation.std,
        loss=config.loss,
        eval_protocol=config.eval_protocol,
        eval_crop_share=config.eval_crop_share,
        ema_decay=config.ema.decay if config.ema and config.ema.model == "ema" else None,
    )


def model_from_elsewhere(recipe: Recipe) -> Path | None:
    """Get the folder stages.swap_head.model, if any, relative to the working folder; UserError: it holds no model, or
    one unlike the recipe's."""
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
            f"stages.finetune.image_size: relative positions are undefined at another resolution than in training, and "
            f"{folder} is of {meta.image_size} px: take {meta.image_size}, not {finetune.image_size}"
        )
    return folder


def _resolved(config: ModelConfig) -> dict[str, object]:
    """Resolve a configuration's values, under the recipe's keys."""
    match config.kind:
        case "vit":
            sizes = asdict(config.sizes)
        case "resnet":
            sizes = {"resnet_layers": config.resnet.layers, "resnet_width_factor": config.resnet.width_factor}
    return config.model_dump(exclude={"variant"}) | sizes

"""Describe a stage's model before it has weights, and find the model that swap_head starts from. No torch.

A stage starts by writing its model's record into stage.json, so `predict` and `export` need no data.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.text import named
from shardvit.data_shards.vocabulary import GOOGLES, Normalisation
from shardvit.model.config import ModelConfig
from shardvit.model.formats.first_convolution import channels_objection
from shardvit.model.saved.model_folder import WEIGHTS_FILE, SavedModelMeta
from shardvit.model.vocabulary import COLOUR_CHANNELS, COLOURS, PIXELS
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.sources import record_elsewhere
from shardvit.pipeline.recipe.stages.pretraining import MaskedAutoencoderStage
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.runs.run_folder import RunFolder


@dataclass(frozen=True)
class StageStart:
    """Starting point of a stage's model."""

    weights: str = "random"  # or the digest of the loaded model
    normalisation: Normalisation = GOOGLES  # of pixels
    channels: int = 0  # that images are read as; 0: colours
    notes: tuple[str, ...] = ()  # what `init` loaded, left and made; () without, or on resume


def stage_model(
    recipe: Recipe, *, stage: StageName, classes: Sequence[str] = ("?",), start: StageStart | None = None
) -> SavedModelMeta:
    """Make the record of a training stage's model; without `classes` and `start`, before its data are known."""
    config, usual = recipe.train_stage(stage), (0.5,) * recipe.model.channels
    start = start or StageStart(normalisation=Normalisation(usual, usual))
    known = {"masked_patch": COLOURS, "masked_autoencoder": PIXELS}
    outputs = known.get(config.head_kind, classes)
    return SavedModelMeta(
        model=recipe.model,
        image_size=config.image_size,
        num_classes=len(outputs),
        class_names=tuple(outputs),
        head="linear" if recipe.model.custom else config.head_kind,
        decoder=config.decoder if isinstance(config, MaskedAutoencoderStage) else None,
        mean=start.normalisation.mean,
        std=start.normalisation.std,
        pixels="channels" if start.channels == COLOUR_CHANNELS else None,
        loss=config.loss_kind,
        eval_protocol=config.eval_protocol,
        eval_crop_share=config.eval_crop_share,
        ema_decay=config.ema.decay if config.ema and config.ema.model == "ema" else None,
    )


def begun_normalisation(run: RunFolder, *, stage: StageName) -> Normalisation | None:
    """What a stage with a checkpoint was begun with, whatever the set's statistics say by now; None without one."""
    record = run.peek(stage)
    if record.last_saved_step <= 0 or not record.model:
        return None
    meta = SavedModelMeta.model_validate(record.model)
    return Normalisation(mean=meta.mean, std=meta.std)


def model_from_elsewhere(recipe: Recipe) -> Path | None:
    """Get the folder swap_head.model (relative to the working folder), if any; UserError if its model does not fit."""
    config = recipe.stages.swap_head
    if config is None or config.model is None:
        return None
    folder = Path(config.model)
    meta = record_elsewhere(folder)
    key = "stages.swap_head.model"
    check_same_model(
        recipe, meta, key=key, source=folder, advice=", or leave model out (model=null) to take the folder's"
    )
    if not (folder / WEIGHTS_FILE).is_file():
        raise UserError(f"stages.swap_head.model: {folder / WEIGHTS_FILE} is missing: the model has no weights")
    check_same_size(recipe, meta, stage="finetune", source=folder)
    return folder


def check_kept_head(recipe: Recipe, *, before: Sequence[str], classes: Sequence[str], head: str = "linear") -> None:
    """UserError if swap_head keeps the head, and the classes that it knows are not fine-tuning's."""
    config = recipe.stages.swap_head
    if config is None or config.head == "new":
        return
    if head != "linear":
        raise UserError(f"stages.swap_head.head is kept, but {config.model}'s is of kind {head}: set head to new")
    if tuple(before) != tuple(classes):
        raise UserError(
            f"stages.swap_head.head is kept, but the model's classes ({named(before)}) are not those of "
            f"stages.finetune.train ({named(classes)}): set head to new"
        )


def check_same_model(recipe: Recipe, meta: SavedModelMeta, *, key: str, source: Path | str, advice: str = "") -> None:
    """UserError unless the model at `source` is the recipe's, in sizes and in semantics."""
    theirs, ours = _resolved(meta.model), _resolved(recipe.model)
    if recipe.model.custom is None and meta.model.custom is None:
        if objection := channels_objection(meta.model, channels=recipe.model.channels):
            raise UserError(f"{key}: {source}: {objection}")
        for each in (theirs, ours):
            each.pop("channels", None)
    different = [key for key in theirs | ours if theirs.get(key) != ours.get(key)]
    if different and (theirs.get("custom") or ours.get("custom")):
        raise UserError(
            f"{key}: an own model starts from a run of the same code and options, and {source} is of others"
        )
    if different:
        shown = ", ".join(f"{key} {theirs.get(key)} (not {ours.get(key)})" for key in different)
        raise UserError(f"{key}: {source} is another model than the recipe's; under model, set {shown}{advice}")


def check_same_size(recipe: Recipe, meta: SavedModelMeta, *, stage: StageName, source: Path | str) -> None:
    """UserError if the positions of the model at `source` cannot go to the stage's resolution."""
    wanted = recipe.train_stage(stage).image_size
    if meta.model.position == "relative" and meta.image_size != wanted:
        raise UserError(
            f"stages.{stage}.image_size: relative positions are undefined at another resolution than in training, and "
            f"{source} is of {meta.image_size} px: take {meta.image_size}, not {wanted}"
        )


def _resolved(config: ModelConfig) -> dict[str, object]:
    if config.custom is not None:
        return config.model_dump()
    match config.kind:
        case "vit":
            sizes = asdict(config.sizes)
        case "resnet":
            sizes = {"resnet_layers": config.resnet.layers, "resnet_width_factor": config.resnet.width_factor}
    return config.model_dump(exclude={"variant"}) | sizes

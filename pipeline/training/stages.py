"""Run the paper's stages: masked_patch, masked_autoencoder or pretrain, then swap_head, finetune.

A stage takes only `STAGE/model/` from the previous one: no optimizer state, learning rate or clipping.
With `init: WEIGHTS`, loaded weights take the place of random ones.

    masked_patch        random weights + mask token + Linear for tokens   -> trained on colours of corrupted patches
    masked_autoencoder  random weights + decoder                          -> trained on pixels of hidden patches
    pretrain            random weights + MLP head (Linear, tanh, Linear)  -> trained on the pre-training classes
    swap_head           everything after the trunk dropped                -> a zero-initialised Linear for new classes
    finetune            position embeddings interpolated to the new grid  -> trained at higher resolution
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from shardvit.data_shards.durable import make_folders
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.decode import require_decoder
from shardvit.data_shards.vocabulary import Normalisation
from shardvit.model.formats.first_convolution import with_channels
from shardvit.model.init import initialise
from shardvit.model.layers.head import replace_head
from shardvit.model.own.custom import build_custom, measure, replace_own_head, resized_own_state
from shardvit.model.positions.interpolation import resize_state
from shardvit.model.saved.model_folder import (
    SavedModelMeta,
    build_described,
    build_from_saved,
    load_model,
    save_model,
)
from shardvit.model.self_supervised import masked_autoencoder, masked_patch
from shardvit.model.self_supervised.masked_autoencoder import MaskedAutoencoderVit, build_masked_autoencoder
from shardvit.model.self_supervised.masked_patch import MaskedPatchVit, build_masked_patch
from shardvit.model.vit import build_model, takes_other_sizes
from shardvit.model.vocabulary import HeadKind
from shardvit.pipeline.checkpoint.train_state import TrainState
from shardvit.pipeline.engine.saved_state.frozen import freeze
from shardvit.pipeline.own_code.by_path import shown
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stage_plan import plan_stage
from shardvit.pipeline.recipe.stages.finetuning import FinetuneStage
from shardvit.pipeline.recipe.stages.image_growth import growth_of
from shardvit.pipeline.recipe.stages.pretraining import MaskedAutoencoderStage, PretrainStage, SelfSupervisedStage
from shardvit.pipeline.recipe.stages.train_stage import TrainStage
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.report.reporter import attempt_events, attempt_log
from shardvit.pipeline.runs.run_folder import check_model, weights_digest
from shardvit.pipeline.stage.context import StageContext
from shardvit.pipeline.stage.data_once import open_data_once
from shardvit.pipeline.stage.data_record import kept_manifests
from shardvit.pipeline.stage.data_workers import expect_data_workers
from shardvit.pipeline.stage.initial_model import StageStart, begun_normalisation, check_kept_head, model_from_elsewhere
from shardvit.pipeline.stage.stage_data import Stage, StageData, open_data, settled_normalisation
from shardvit.pipeline.tasks.make_task import task_outputs
from shardvit.pipeline.training.stage_training import train_stage
from shardvit.pipeline.using.start_weights import load_weights


def run_stage(context: StageContext, *, stage: StageName) -> None:
    """Run or resume one stage; collective. UserError if an earlier stage is not done or an input has changed; Stopped
    by a signal, after saving."""
    earlier = context.recipe.stages.names[: context.recipe.stages.names.index(stage)]
    missing = [name for name in earlier if context.folder.record(name).state != "done"]
    if missing:
        raise UserError(f"stage {stage} needs {' and '.join(missing)} first: run the recipe without --stage")
    if stage == "swap_head":
        with context.watch(stage) if context.ranks.place.world_size > 1 else nullcontext():
            context.on_main(lambda: swap_head(context), takes="long")
        return
    recipe, config = context.recipe, context.recipe.train_stage(stage)
    require_decoder(recipe.data.decoder)
    context.start.set_status("opening shards")
    data = open_data_once(context, stage=stage)
    expect_data_workers(recipe)
    processes = context.ranks.place.world_size
    plan = plan_stage(recipe, stage=stage, samples_per_epoch=data.train.num_samples, world_size=processes)
    context.start.set_status("building the model")
    outputs = task_outputs(config, classes=data.train.classes)
    if outputs != data.train.classes and isinstance(config, FinetuneStage) and config.start == "swap_head":
        raise UserError(
            f"stages.{stage}.task {shown(config.task)}: swap_head made a head of the shards' classes: leave the "
            "task's outputs out, or set start: scratch"
        )
    model, start = initial_model(context, config, stage=stage, data=data, outputs=outputs)
    start = replace(start, channels=data.channels)
    train_stage(context, Stage(recipe, stage, data, plan, run=context.folder), model=model, start=start)


def build_stage_model(recipe: Recipe, config: TrainStage, *, num_classes: int) -> nn.Module:
    """Build a training stage's model with placeholder weights."""
    model = _built(recipe, config, num_classes=num_classes)
    if growth_of(config.image_size):
        takes_other_sizes(model, interpolation=recipe.model.interpolation)
    return model


def _built(recipe: Recipe, config: TrainStage, *, num_classes: int) -> nn.Module:
    size, regularisation = config.image_size, config.regularisation
    if config.head_kind == "masked_patch":
        return build_masked_patch(recipe.model, image_size=size, regularisation=regularisation)
    if isinstance(config, MaskedAutoencoderStage):
        return build_masked_autoencoder(recipe.model, image_size=size, decoder=config.decoder)
    try:
        return build_model(
            recipe.model,
            image_size=size,
            num_classes=num_classes,
            head=cast("HeadKind", config.head_kind),
            regularisation=regularisation,
            seed=recipe.seed,
        )
    except ValueError as error:  # an own model's
        raise UserError(str(error)) from None


def initial_model(
    context: StageContext, config: TrainStage, *, stage: StageName, data: StageData, outputs: Sequence[str]
) -> tuple[nn.Module, StageStart]:
    """Make a stage's model before its first step: random, that of `init`, or swap_head's at the new resolution."""
    recipe, folder = context.recipe, context.folder
    model = build_stage_model(recipe, config, num_classes=len(outputs))
    if not isinstance(config, FinetuneStage) or config.start == "scratch":
        assert isinstance(config, SelfSupervisedStage | PretrainStage | FinetuneStage)
        head_bias = config.head_bias if isinstance(config, PretrainStage) else 0.0
        if recipe.model.custom is None:
            initialise(model, seed=recipe.seed, head_bias=head_bias, style=config.init_style)
        start, theirs = StageStart(), False
        if config.init_weights is not None:
            start, theirs = load_weights(recipe, stage=stage, run=folder, model=model, outputs=outputs), True
        begun = begun_normalisation(folder, stage=stage)
        chosen = begun or settled_normalisation(
            recipe, data, stage=stage, theirs=start.normalisation if theirs else None
        )
        return model, replace(start, normalisation=chosen)
    meta, state = load_model(check_model(folder, stage="swap_head"))
    before, now = meta.image_size, config.image_size
    if recipe.model.custom is not None:
        model.load_state_dict(resized_own_state(model, state, from_image_size=before, to_image_size=now))
    else:
        model.load_state_dict(resize_state(state, config=recipe.model, from_image_size=before, to_image_size=now))
    normalisation = Normalisation(mean=meta.mean, std=meta.std)  # of the model to start from
    return model, StageStart(folder.record("swap_head").model_digest, normalisation)


def check_frozen(recipe: Recipe, *, stage: StageName) -> None:
    """UserError if `optimizer.frozen` names a part that the model lacks, or everything; allocates no weights."""
    config = recipe.train_stage(stage)
    with torch.device("meta"):
        model = build_stage_model(recipe, config, num_classes=1)
    freeze(model, config.optimizer.frozen, key=f"stages.{stage}.optimizer.frozen")


def check_own_model(recipe: Recipe) -> None:
    """Build an own model of each size on no device, and try what the stages need of it; UserError if it lacks it."""
    sizes: dict[StageName, int] = {name: recipe.train_stage(name).image_size for name in recipe.stages.trained}
    try:
        with torch.device("meta"):
            for name, size in sizes.items():
                measure(recipe.model, image_size=size, num_classes=2)
                model = build_custom(recipe.model, image_size=size, num_classes=2)
                if recipe.train_stage(name).optimizer.layer_decay != 1 and not hasattr(model, "group_matcher"):
                    raise ValueError(
                        f"stages.{name}.optimizer.layer_decay: the own model has no group_matcher, as timm's"
                    )
            if recipe.stages.swap_head is not None and "finetune" in sizes and len(sizes) > 1:
                first = build_custom(recipe.model, image_size=min(sizes.values()), num_classes=2)
                replace_own_head(first, 2)
                model = build_custom(recipe.model, image_size=sizes["finetune"], num_classes=2)
                before = next(size for name, size in sizes.items() if name != "finetune")
                if not callable(getattr(model, "resize_state", None)):
                    old = build_custom(recipe.model, image_size=before, num_classes=2)
                    resized_own_state(model, old.state_dict(), from_image_size=before, to_image_size=sizes["finetune"])
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from None


def swap_head(context: StageContext) -> None:
    """Replace the pre-training head with a zero Linear for the fine-tuning classes; on rank 0."""
    recipe, folder = context.recipe, context.folder
    kept = kept_manifests(folder, stages=recipe.stages.trained)
    data = open_data(recipe, stage="finetune", report=context.say, commands="run", manifests=kept)
    classes = data.train.classes
    source = elsewhere = model_from_elsewhere(recipe)
    if source is None:
        source = check_model(folder, stage=recipe.stages.first or "pretrain")
    folder.update("swap_head", state="running", inputs={"weights": weights_digest(source)})
    with (
        attempt_log(context, stage="swap_head") as log,
        attempt_events(context, stage="swap_head", state=TrainState(), say=context.say),
    ):
        try:
            old, model = build_from_saved(source)
            if elsewhere is not None:
                old, model = _for_these_images(recipe, data, old, model)
        except ValueError as error:
            raise UserError(f"stages.swap_head: {error}") from None
        check_kept_head(recipe, before=old.class_names, classes=classes, head=old.head)
        keeps = recipe.stages.swap_head is not None and recipe.stages.swap_head.head == "kept"
        dropped = 0 if keeps else _num_parameters(model.get_submodule("head"))
        new = {"config": old.model, "image_size": old.image_size, "num_classes": len(classes), "seed": recipe.seed}
        if keeps:
            pass  # head and all
        elif isinstance(model, MaskedPatchVit):
            dropped += model.mask_token.numel()
            model = masked_patch.classifier_of(model, **new)
        elif isinstance(model, MaskedAutoencoderVit):
            dropped += _num_parameters(model.decoder)
            model = masked_autoencoder.classifier_of(model, **new)
        elif recipe.model.custom is not None:
            replace_own_head(model, len(classes))
        else:
            replace_head(model, len(classes))
        attached = 0 if keeps else _num_parameters(model.get_submodule("head"))
        values = {
            "model/head_parameters_dropped": float(dropped),
            "model/head_parameters_attached": float(attached),
            "model/parameters": float(_num_parameters(model)),
        }
        log.append(step=0, images_seen=0, metrics=values)
        meta = old.model_copy(
            update={"num_classes": len(classes), "class_names": classes, "head": "linear", "decoder": None}
        )
        make_folders(folder.stage("swap_head"), below=folder.path)  # fails if the run folder is gone
        save_model(folder.model("swap_head"), model.state_dict(), meta=meta)
        folder.update("swap_head", state="done", results=values, model_digest=weights_digest(folder.model("swap_head")))
    swapped = (
        f"dropped the pre-training head ({dropped:,} parameters), attached a zero-initialised linear layer "
        f"({attached:,} parameters)"
    )
    print(f"swap_head: {'kept the head' if keeps else swapped} for {len(classes)} classes", flush=True)


def _for_these_images(recipe: Recipe, data: StageData, meta: SavedModelMeta, model: Any) -> tuple[SavedModelMeta, Any]:
    """Fit a model from elsewhere to the recipe's channels, and choose its normalisation."""
    theirs, channels = Normalisation(mean=meta.mean, std=meta.std), recipe.model.channels
    chosen = settled_normalisation(recipe, data, stage="finetune", theirs=theirs)
    config = meta.model.model_copy(update={"channels": channels})
    fitted = meta.model_copy(update={"model": config, "mean": chosen.mean, "std": chosen.std})
    if channels != meta.model.channels:
        state = with_channels(model.state_dict(), config=meta.model, channels=channels)
        model = build_described(fitted)
        model.load_state_dict(state)
    return fitted, model


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

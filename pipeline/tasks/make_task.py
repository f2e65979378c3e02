"""Which task a stage trains: by its recipe, or the user's own."""

from functools import partial
from typing import Any

import torch

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.vocabulary import Normalisation
from shardvit.model.loss import LossFunction, loss_function
from shardvit.pipeline.engine.base import Engine
from shardvit.pipeline.own_code.by_path import OwnCode, load_own, shown
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stages.pretraining import MaskedAutoencoderStage, MaskedPatchStage
from shardvit.pipeline.recipe.stages.train_stage import TrainStage
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.stage.stage_data import StageData
from shardvit.pipeline.stage.task import Classification, Task
from shardvit.pipeline.tasks.distillation import Distillation
from shardvit.pipeline.tasks.patch_corruption import MaskedPatches
from shardvit.pipeline.tasks.patch_reconstruction import PatchReconstruction
from shardvit.pipeline.using.teacher import Teacher


def make_task(
    recipe: Recipe,
    *,
    stage: StageName,
    data: StageData,
    normalisation: Normalisation,
    engine: Engine,
    teacher: Teacher | None = None,
) -> Task:
    """Make a stage's task; UserError if an own one lacks what the loop calls."""
    config = recipe.train_stage(stage)
    if isinstance(config, MaskedPatchStage):
        return MaskedPatches(engine=engine, seed=recipe.seed, patch_size=recipe.model.sizes.patch_size)
    if isinstance(config, MaskedAutoencoderStage):
        return PatchReconstruction(
            engine=engine,
            seed=recipe.seed,
            patch_size=recipe.model.sizes.patch_size,
            mask_ratio=config.mask_ratio,
            target=config.target,
            normalisation=normalisation,
        )
    kind: Any = load_own(config.task) if config.task else Classification
    if teacher is not None:
        precision, device = recipe.engine.precision, engine.device
        kind = partial(Distillation, teacher=teacher.settle(precision, device=device, normalisation=normalisation))
    made = kind(
        engine=engine,
        classes=task_outputs(config, classes=data.train.classes),
        label_kind="multi" if data.train.is_multi_label else "single",
        normalisation=normalisation,
        train_loss=loss_function(
            config.loss, label_smoothing=config.label_smoothing, target_threshold=config.target_threshold
        )
        if isinstance(config.loss, str)
        else _own_loss(config.loss.custom),
        loss_kind=config.loss_kind,
        seed=recipe.seed,
    )
    if lacking := [name for name in _TASKS if not hasattr(made, name)]:
        raise UserError(
            f"stages.{stage}.task {shown(config.task)}: it has no {lacking[0]}: take Classification as its base"
        )
    if (made.score, made.train_metric) not in _SCORES:
        raise UserError(
            f"stages.{stage}.task {shown(config.task)}: score is top1 or accuracy, train_metric is train/SCORE"
        )
    return made


def task_outputs(config: TrainStage, *, classes: tuple[str, ...]) -> tuple[str, ...]:
    """Name the outputs of a stage's model: the classes, unless its own task has others."""
    own = None if config.task is None else getattr(load_own(config.task), "outputs", None)
    return own if isinstance(own, tuple) else classes  # a property depends on the classes


def _own_loss(code: OwnCode) -> LossFunction:
    """The user's loss, in float32 as the others."""
    function = load_own(code)

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = function(logits.float(), targets)
        if not isinstance(found, torch.Tensor) or found.shape not in ((), (len(logits),)) or not found.requires_grad:
            got = type(found).__name__
            if isinstance(found, torch.Tensor):
                got = f"a tensor {[*found.shape]}" + ("" if found.requires_grad else ", without a gradient")
            raise UserError(
                f"loss.custom {shown(code)}: it returned {got}: return the mean, or a loss per image, [{len(logits)}]"
            )
        return found.mean() if found.ndim else found

    return loss


_TASKS = ("step", "engine", "outputs", "kind_of_output", "example", "loss", "train_score", "tally")
_SCORES = (("top1", "train/top1"), ("accuracy", "train/accuracy"))

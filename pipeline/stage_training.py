"""One training stage, put together: plan, engine, data, checkpoints, report; then the loop; then the result.

Assembly only. The loop is `train_loop`, the arithmetic `plan`, what tells the stages apart `stages`.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from torch import nn

from data_shards.assemble import Access
from data_shards.batch import GOOGLES, Normalisation
from data_shards.errors import UserError
from data_shards.images.decode import require_decoder
from data_shards.loader import EvalBatches, Layout, TrainBatches, TrainLoader, eval_batches
from data_shards.shard_set import ShardSet
from model.config import HeadKind
from model.flops import account
from model.saved import SavedModelMeta, save_model
from pipeline.checkpoint import Restored, restore_checkpoint, save_checkpoint
from pipeline.context import StageContext
from pipeline.engine import Engine
from pipeline.engine_open import open_engine
from pipeline.evaluate import evaluate
from pipeline.faults import FILE as FAULTS_FILE
from pipeline.faults import FaultLedger
from pipeline.identity import checkpoint_identity
from pipeline.images import eval_transform, mixup, train_transform
from pipeline.plan import StagePlan, plan_stage
from pipeline.recipe import Recipe, StageName
from pipeline.report import Report
from pipeline.run_folder import check_inputs, weights_digest
from pipeline.schedule import Schedule
from pipeline.stage_data import StageData, cache_advice, training_order
from pipeline.stage_report import stage_report
from pipeline.state import TrainState
from pipeline.task import Task, make_task
from pipeline.train_loop import TrainJob, train


@dataclass(frozen=True)
class StageStart:
    """What a stage's model is before its first step."""

    head: HeadKind | Literal["masked_patch"]
    weights: str  # "random", or the digest of the model it was loaded from
    normalisation: Normalisation = GOOGLES  # of its pixels


def train_stage(
    context: StageContext, *, stage: StageName, data: StageData, model: nn.Module, start: StageStart
) -> None:
    """Train `model` to the end of the stage, or go on from its last checkpoint; leave STAGE/model; collective.

    Raises:
        UserError: data, weights or checkpoints are not those that the stage was begun with.
        Stopped: by a signal, after saving.
    """
    recipe, folder, ranks = context.recipe, context.folder, context.ranks
    require_decoder(recipe.data.decoder)
    plan = plan_stage(recipe, stage=stage, samples_per_epoch=data.train.num_samples, world_size=ranks.place.world_size)
    inputs = {"training images": data.train.digest, "held-out images": data.eval.digest, "weights": start.weights}
    record = folder.record(stage)
    check_inputs(folder, stage=stage, inputs=inputs)
    if recipe.engine.activation_checkpointing:
        model.set_grad_checkpointing(True)  # pyright: ignore[reportCallIssue]
    engine = open_engine(recipe, stage=stage, plan=plan, model=model, ranks=ranks)
    restored = restore_checkpoint(
        folder.checkpoints(stage),
        engine=engine,
        ranks=ranks,
        identity=checkpoint_identity(recipe, stage=stage, processes=ranks.place.world_size),
    )
    if restored is None and record.last_saved_step > 0:
        raise UserError(
            f"{folder.checkpoints(stage)} holds no checkpoint, but one was saved at step {record.last_saved_step}: "
            f"bring it back, or begin again with --restart {stage}"
        )
    state = restored.state if restored else TrainState()
    ranks.barrier()  # every rank has read stage.json before it changes
    if ranks.place.is_main:
        folder.update(stage, state="running", inputs=inputs)

    with stage_report(context, stage=stage, data=data, plan=plan, state=state) as report:
        config = recipe.train_stage(stage)
        task = make_task(recipe, stage=stage, data=data, normalisation=start.normalisation, engine=engine)
        report.note(f"{stage}: {config.image_size} px, {len(task.outputs)} {task.kind_of_output}; {plan.describe()}")
        if start.head != "masked_patch":
            cost = account(
                recipe.model,
                image_size=config.image_size,
                num_classes=len(task.outputs),
                head=start.head,
                patch_dropout=config.patch_dropout,
            )
            kept = "checkpointed" if recipe.engine.activation_checkpointing else "all"
            report.note(f"{stage}: {cost.describe(activations=kept)}")
        for damage in (*data.train.damage, *data.eval.damage):
            report.note(damage)
        if ranks.place.is_main:
            advice = cache_advice(recipe, data=data, plan=plan, processes_per_node=ranks.place.local_world_size)
            if advice:
                report.note(advice)
        if restored:
            report.note(describe_restored(restored, plan=plan))
        job = _training_job(
            context, stage=stage, data=data, plan=plan, task=task, engine=engine, state=state, report=report
        )
        with closing(job.batches):
            state = train(job, state)
        weights = engine.weights()
        if ranks.place.is_main:
            meta = SavedModelMeta(
                model=recipe.model,
                image_size=config.image_size,
                num_classes=len(task.outputs),
                class_names=task.outputs,
                head=start.head,
                mean=start.normalisation.mean,
                std=start.normalisation.std,
                loss=config.loss,
                eval_protocol=config.eval_protocol,
                eval_crop_share=config.eval_crop_share,
            )
            save_model(folder.model(stage), weights, meta=meta)
            folder.update(
                stage, state="done", results=state.evaluation, model_digest=weights_digest(folder.model(stage))
            )


def _training_job(
    context: StageContext,
    *,
    stage: StageName,
    data: StageData,
    plan: StagePlan,
    task: Task,
    engine: Engine,
    state: TrainState,
    report: Report,
) -> TrainJob:
    """Everything the loop needs, from the state's step on."""
    recipe, folder, ranks = context.recipe, context.folder, context.ranks
    config = recipe.train_stage(stage)
    layout = Layout(
        rank=ranks.place.rank,
        world_size=ranks.place.world_size,
        micro_batch_size=plan.micro_batch_size,
        accumulation_steps=plan.accumulation_steps,
    )
    faults = FaultLedger(
        folder.stage(stage) / FAULTS_FILE,
        num_samples={"train": data.train.num_samples, "eval": data.eval.num_samples},
        max_share=recipe.data.max_corrupt_share,
    )
    train_batches = TrainBatches(
        _access(data.train, data=data, recipe=recipe),
        order=training_order(recipe, data=data, plan=plan),
        transform=train_transform(config),
        layout=layout,
        seed=recipe.seed,
        mixup=mixup(config),
    )
    held_out = EvalBatches(
        _access(data.eval, data=data, recipe=recipe),
        transform=eval_transform(config),
        rank=layout.rank,
        world_size=layout.world_size,
        batch_size=plan.micro_batch_size,
    )

    def run_evaluation() -> dict[str, float]:
        return evaluate(
            eval_batches(held_out, workers=recipe.data.workers, kind=recipe.data.kind_of_workers),
            task=task,
            engine=engine,
            ranks=ranks,
            faults=faults,
        )

    def save(at: TrainState) -> None:
        save_checkpoint(
            folder.checkpoints(stage),
            engine=engine,
            state=at,
            ranks=ranks,
            identity=checkpoint_identity(recipe, stage=stage, processes=layout.world_size),
            keep=config.keep_checkpoints,
        )
        if ranks.place.is_main:
            folder.update(stage, last_saved_step=at.step, images_seen=at.images_seen, seconds=at.training_seconds)

    return TrainJob(
        engine=engine,
        ranks=ranks,
        plan=plan,
        schedule=Schedule(
            peak_lr=config.optimizer.lr,
            total_steps=plan.total_steps,
            warmup_steps=plan.warmup_steps,
            decay=config.schedule.decay,
            end_lr=config.schedule.end_lr,
        ),
        seed=recipe.seed,
        max_skipped_steps=recipe.engine.max_skipped_steps,
        patch_dropout=config.patch_dropout,
        batches=TrainLoader(
            train_batches,
            start_step=state.step,
            stop_step=plan.total_steps,
            workers=recipe.data.workers,
            kind=recipe.data.kind_of_workers,
        ),
        faults=faults,
        task=task,
        evaluate=run_evaluation,
        save=save,
        report=report,
        stop=context.stop,
    )


def _access(shards: ShardSet, *, data: StageData, recipe: Recipe) -> Access:
    on_corrupt = "substitute" if recipe.data.max_corrupt_share > 0 else "stop"
    return Access(shards, store=data.store, decoder=recipe.data.decoder, on_corrupt=on_corrupt)


def describe_restored(restored: Restored, *, plan: StagePlan) -> str:
    """What was restored, for the screen."""
    state = restored.state
    age_minutes = (time.time() - restored.folder.stat().st_mtime) / 60
    lines = [
        *restored.notes,
        f"going on from {restored.folder}, {age_minutes:.0f} minutes old: step {state.step:,} of "
        f"{plan.total_steps:,}, {state.images_seen:,} images seen, epoch "
        f"{state.images_seen / plan.samples_per_epoch:.2f}, {state.skipped_steps} steps skipped so far",
    ]
    return "\n".join(lines)

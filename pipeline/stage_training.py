"""One training stage, put together: plan, engine, data, checkpoints, report; then the loop; then the result.

Assembly only. The loop is `train_loop`, the arithmetic `plan`, what tells the stages apart `stages`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from torch import nn

from data_shards.durable import make_folders
from data_shards.errors import UserError
from data_shards.images.decode import require_decoder
from data_shards.loading.batch import GOOGLES, Normalisation
from model.counting.flops import account
from model.saved import save_model
from model.vocabulary import COLOURS, HeadKind
from pipeline.checkpoint.identity import checkpoint_identity
from pipeline.checkpoint.note import describe_changes, describe_restored
from pipeline.checkpoint.room import check_free_space, estimate_bytes
from pipeline.checkpoint.store import Restored, restore_checkpoint
from pipeline.checkpoint.written_by import written_by
from pipeline.context import StageContext
from pipeline.data_record import DataRecord, check_data, keep_data
from pipeline.engine.open import open_engine
from pipeline.ranks.watch import Watch
from pipeline.recipe.schema import StageName
from pipeline.recipe.stage_plan import StagePlan, plan_stage
from pipeline.report.best import best_results, describe_best
from pipeline.report.metrics_log import iter_metrics
from pipeline.report.reporter import stage_report
from pipeline.run_folder import check_inputs, weights_digest
from pipeline.stage_data import StageData, cache_advice, training_order
from pipeline.stage_model import stage_model
from pipeline.state import TrainState
from pipeline.task import Task, make_task
from pipeline.train_loop import TrainJob, train
from pipeline.training_job import training_job


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
    data_record = _check_data(context, stage=stage, data=data)
    check_inputs(folder, stage=stage, inputs=inputs)
    watch = Watch(
        folder.ranks(stage),
        place=ranks.place,
        attempt=str(ranks.gather_objects(f"{os.getpid()} {time.time_ns()}")[0]),
        hang_seconds=recipe.engine.hang_seconds,
        say=lambda text: print(f"shardvit: {text}", file=sys.stderr, flush=True),
    )
    with watch:
        watch.beat(0, doing="opening the engine")
        if recipe.engine.activation_checkpointing:
            model.set_grad_checkpointing(True)  # pyright: ignore[reportCallIssue]
        if record.last_saved_step < plan.total_steps:
            _demand_room(context, stage=stage, model=model)
        engine = open_engine(recipe, stage=stage, plan=plan, model=model, ranks=ranks)
        watch.beat(0, doing="restoring a checkpoint")
        identity = checkpoint_identity(recipe, stage=stage, processes=ranks.place.world_size)
        restored = restore_checkpoint(folder.checkpoints(stage), engine=engine, ranks=ranks, identity=identity)
        if restored is None and record.last_saved_step > 0:
            raise UserError(
                f"{folder.checkpoints(stage)} holds no checkpoint, but one was saved at step {record.last_saved_step}: "
                f"bring it back, or begin again with --restart {stage}"
            )
        state = restored.state if restored else TrainState()
        ranks.barrier()  # every rank has read stage.json before it changes
        meta = stage_model(
            recipe,
            stage=stage,
            classes=COLOURS if start.head == "masked_patch" else data.train.classes,
            head=start.head,
            normalisation=start.normalisation,
        )
        if ranks.place.is_main:
            assert data_record is not None
            keep_data(folder, data_record, stage=stage)
            described = meta.model_dump(mode="json", exclude_none=True)
            folder.update(
                stage,
                state="running",
                inputs=inputs,
                data_digest=data_record.digest,
                total_steps=plan.total_steps,
                model=described,
            )

        with stage_report(context, stage=stage, data=data, plan=plan, state=state) as report:
            task = make_task(recipe, stage=stage, data=data, normalisation=start.normalisation, engine=engine)
            job = training_job(
                context,
                stage=stage,
                data=data,
                plan=plan,
                task=task,
                engine=engine,
                restored=restored,
                watch=watch,
                report=report,
            )
            if ranks.place.is_main:
                for line in _opening_lines(
                    context, stage=stage, data=data, plan=plan, task=task, start=start, restored=restored, job=job
                ):
                    report.note(line)
            with closing(job.batches), closing(job.saver):
                state = train(job, state)
            stall_seconds = job.saver.stall_seconds
            report.note(
                f"{stage}: training stood still for its checkpoints for {stall_seconds:.1f} s, "
                f"{stall_seconds / report.attempt_seconds:.1%} of the time"
            )
            watch.beat(state.step, doing="writing the model")
            weights = engine.weights()
            if ranks.place.is_main:
                best = best_results(
                    iter_metrics(folder.stage(stage) / "metrics.jsonl"),
                    last=state.evaluation,
                    by="val/loss" if recipe.train_stage(stage).keep_best == "loss" else f"val/{task.score}",
                )
                if best:
                    report.note(f"{stage}: {describe_best(best, stage=stage, checkpoints=folder.checkpoints(stage))}")
                make_folders(folder.stage(stage), below=folder.path)  # fails where the run folder is gone
                save_model(folder.model(stage), weights, meta=meta)
                folder.update(
                    stage,
                    state="done",
                    results={**state.evaluation, **best},
                    model_digest=weights_digest(folder.model(stage)),
                )


def _check_data(context: StageContext, *, stage: StageName, data: StageData) -> DataRecord | None:
    """What the stage's data are, on rank 0; where they have changed, refuse on all ranks alike."""
    record, problem = None, ""
    if context.ranks.place.is_main:
        try:
            record = check_data(context.folder, stage=stage, data=data)
        except UserError as error:
            problem = str(error)
        else:
            for note in record.notes:
                context.say(note)
    problem = str(context.ranks.gather_objects(problem)[0])
    if problem:
        raise UserError(problem)
    return record


def _demand_room(context: StageContext, *, stage: StageName, model: nn.Module) -> None:
    """Refuse, on all ranks alike, to begin what could not be saved."""
    recipe, problem = context.recipe, ""
    if context.ranks.place.is_main:
        needed_bytes = estimate_bytes(
            sum(parameter.numel() for parameter in model.parameters()),
            engine=recipe.engine,
            optimizer=recipe.train_stage(stage).optimizer.name,
        )
        try:
            check_free_space(context.folder.checkpoints(stage), needed_bytes=needed_bytes)
        except UserError as error:
            problem = str(error)
    problem = str(context.ranks.gather_objects(problem)[0])
    if problem:
        raise UserError(problem)


def _opening_lines(
    context: StageContext,
    *,
    stage: StageName,
    data: StageData,
    plan: StagePlan,
    task: Task,
    start: StageStart,
    restored: Restored | None,
    job: TrainJob,
) -> Iterator[str]:
    """What is about to be done, for the screen; asked on rank 0 alone."""
    recipe, ranks = context.recipe, context.ranks
    config = recipe.train_stage(stage)
    yield f"{stage}: {config.image_size} px, {len(task.outputs)} {task.kind_of_output}; {plan.describe()}"
    if start.head != "masked_patch":
        cost = account(
            recipe.model,
            image_size=config.image_size,
            num_classes=len(task.outputs),
            head=start.head,
            patch_dropout=config.patch_dropout,
        )
        kept = "checkpointed" if recipe.engine.activation_checkpointing else "all"
        yield f"{stage}: {cost.describe(activations=kept)}"
    yield from (*data.train.damage, *data.eval.damage)
    advice = cache_advice(recipe, data=data, plan=plan, processes_per_node=ranks.place.local_world_size)
    if advice:
        yield advice
    if restored:
        yield describe_restored(
            restored,
            plan=plan,
            order=training_order(recipe, data=data, plan=plan),
            shards=data.train,
            lr=job.schedule(restored.state.step),
        )
        changes = describe_changes(
            restored,
            recipe=recipe,
            identity=checkpoint_identity(recipe, stage=stage, processes=ranks.place.world_size),
            written_by=written_by(),
        )
        if changes:
            yield changes

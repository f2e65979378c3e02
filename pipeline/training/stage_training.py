"""One training stage, assembled: plan, engine, data, checkpoints, report; then the loop; then the result.

The loop is `train_loop`, the arithmetic `recipe.stage_plan`; the stages' differences are in `stages`.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from data_shards.durable import make_folders
from data_shards.errors import UserError
from data_shards.images.decode import require_decoder
from data_shards.vocabulary import GOOGLES, Normalisation
from model.checkpointing import checkpoint_blocks
from model.formats.export import save_for_others
from model.saved import SavedModelMeta
from model.vocabulary import COLOURS, HeadKind
from pipeline.checkpoint.identity import checkpoint_identity
from pipeline.checkpoint.room import check_free_space, estimate_bytes
from pipeline.checkpoint.saver import CheckpointSaver
from pipeline.checkpoint.store import Restored, Retention, restore_checkpoint
from pipeline.checkpoint.train_state import TrainState
from pipeline.engine.open import open_engine
from pipeline.engine.protocol import Engine
from pipeline.evaluation.evaluate import Evaluated, evaluate, keep_evaluations
from pipeline.evaluation.scores import one_answer
from pipeline.kernels.settle import Kernels, settled_kernels
from pipeline.ranks.pace import Pace
from pipeline.ranks.phases import Phases
from pipeline.ranks.stopping import Requests
from pipeline.ranks.watch import Watch
from pipeline.recipe.io import dump_recipe
from pipeline.recipe.schema import EngineConfig
from pipeline.recipe.stage import TrainStage
from pipeline.recipe.stage_plan import StagePlan, plan_stage
from pipeline.recipe.vocabulary import CORRUPT_SAMPLES_FILE, METRICS_FILE, StageName, WeightsKind
from pipeline.report.best import best_results, describe_best
from pipeline.report.reporter import Report, stage_report
from pipeline.runs.metrics_log import iter_metrics
from pipeline.runs.run_folder import StageRecord, check_inputs, weights_digest
from pipeline.runs.written_by import written_by
from pipeline.stage.batches import held_out, held_out_loader, train_loader, train_stream
from pipeline.stage.context import StageContext
from pipeline.stage.damage import FaultLedger
from pipeline.stage.data import StageData, asked_metrics
from pipeline.stage.data_record import check_data, held_out_name, keep_data
from pipeline.stage.data_workers import data_workers, expect_data_workers
from pipeline.stage.description import describe_start
from pipeline.stage.initial_model import stage_model
from pipeline.stage.rollback import GoBack, abandoned_checkpoints, note_rollback, remove_abandoned
from pipeline.stage.task import Task, make_task
from pipeline.training.train_loop import TrainingFailed, TrainJob, train
from pipeline.transfer.during_training import few_shot_evaluation


@dataclass(frozen=True)
class StageStart:
    """A stage's model before its first step."""

    head: HeadKind | Literal["masked_patch"]
    weights: str  # "random", or the digest of the model it was loaded from
    normalisation: Normalisation = GOOGLES  # of its pixels


def train_stage(
    context: StageContext, *, stage: StageName, data: StageData, model: nn.Module, start: StageStart
) -> None:
    """Train `model` to the end of the stage, from its last checkpoint if any; leave STAGE/model; collective. UserError:
    an input or checkpoint is not one that the stage began with; Stopped: by a signal, after saving."""
    recipe, folder, ranks = context.recipe, context.folder, context.ranks
    require_decoder(recipe.data.decoder)
    expect_data_workers(recipe)
    plan = plan_stage(recipe, stage=stage, samples_per_epoch=data.train.num_samples, world_size=ranks.place.world_size)
    inputs = {"training images": data.train.digest, "held-out images": data.eval.digest, "weights": start.weights}
    inputs |= {held_out_name(name): one.digest for name, one in data.also_eval.items()}
    record = folder.record(stage)
    data_record = context.on_main(lambda: check_data(folder, stage=stage, data=data))
    for note in data_record.notes if data_record else ():
        context.say(note)
    check_inputs(folder, stage=stage, inputs=inputs)
    with context.watch(stage) as watch, settled_kernels(recipe, stage=stage, model=model, run=folder.path) as kernels:
        watch.progress(0, status="opening the engine")
        context.start.set_status("opening the engine")
        checkpoint_blocks(model, every=recipe.engine.checkpointed_every)
        if record.last_saved_step < plan.total_steps:
            context.on_main(lambda: _check_disk(context, stage=stage, model=model))
        engine = open_engine(recipe, stage=stage, plan=plan, model=model, ranks=ranks)
        meta = stage_model(
            recipe,
            stage=stage,
            classes=COLOURS if start.head == "masked_patch" else data.train.classes,
            head=start.head,
            normalisation=start.normalisation,
        )
        while True:
            restored, state = _restore(context, stage=stage, engine=engine, watch=watch)
            if data_record:
                keep_data(folder, data_record, stage=stage)
                folder.update(
                    stage,
                    state="running",
                    inputs=inputs,
                    data_digest=data_record.digest,
                    total_steps=plan.total_steps,
                    lanes=plan.lanes,
                    model=meta.model_dump(mode="json", exclude_none=True),
                )
            try:
                _train(
                    context,
                    stage=stage,
                    data=data,
                    plan=plan,
                    engine=engine,
                    kernels=kernels,
                    start=start,
                    meta=meta,
                    restored=restored,
                    state=state,
                    watch=watch,
                )
                engine.close()
                return
            except GoBack as back:
                note_rollback(context, stage=stage, trouble=back.trouble)


def _restore(
    context: StageContext, *, stage: StageName, engine: Engine, watch: Watch
) -> tuple[Restored | None, TrainState]:
    """The newest undamaged checkpoint that has seen nothing of what is passed over now, and the state to go on from;
    collective."""
    recipe, folder, ranks = context.recipe, context.folder, context.ranks
    watch.progress(0, status="restoring a checkpoint")
    context.start.set_status("restoring a checkpoint")
    abandoned = abandoned_checkpoints(context, stage=stage)
    record: StageRecord = ranks.from_main(folder.record(stage))
    identity = checkpoint_identity(recipe, stage=stage, processes=ranks.place.world_size)
    restored = restore_checkpoint(
        folder.checkpoints(stage), engine=engine, ranks=ranks, identity=identity, without=abandoned
    )
    if restored is None and ranks.from_main(len(abandoned)):
        raise UserError(
            f"all checkpoints in {folder.checkpoints(stage)} have trained on batches that a rollback passes over: "
            f"bring an older one back, or begin again with --restart {stage}"
        )
    if restored is None and record.last_saved_step > 0:
        raise UserError(
            f"{folder.checkpoints(stage)} holds no checkpoint, but one was saved at step {record.last_saved_step}: "
            f"bring it back, or begin again with --restart {stage}"
        )
    state = restored.state if restored else TrainState()
    ranks.barrier()  # every rank has read stage.json before it changes
    remove_abandoned(context, abandoned, stage=stage, restored=state)
    state.passed_over, state.rollbacks = list(record.passed_over), record.rollbacks
    return restored, state


def _train(
    context: StageContext,
    *,
    stage: StageName,
    data: StageData,
    plan: StagePlan,
    engine: Engine,
    kernels: Kernels,
    start: StageStart,
    meta: SavedModelMeta,
    restored: Restored | None,
    state: TrainState,
    watch: Watch,
) -> None:
    """From a checkpoint, or the beginning, to the end of the stage; collective. GoBack: to an earlier checkpoint."""
    recipe, folder, ranks = context.recipe, context.folder, context.ranks
    pace = make_pace(recipe.engine, device=engine.device, drawing_seconds=context.drawing_seconds)
    phases = Phases(watch=watch, pace=pace, start=context.start)
    context.start.set_status("preparing data and records")
    with stage_report(
        context, stage=stage, data=data, plan=plan, state=state, phases=phases, tags=kernels.tags
    ) as report:
        if context.start.say is not None:
            context.start.say = report.note  # beside a bar
        if kernels.compiled:
            kernels.compiled.tell = lambda line: report.note(f"{stage}: {line}")
        task = make_task(recipe, stage=stage, data=data, normalisation=start.normalisation, engine=engine)
        job = make_job(
            context,
            stage=stage,
            data=data,
            plan=plan,
            task=task,
            engine=engine,
            state=state,
            watch=watch,
            report=report,
        )
        if ranks.place.is_main:
            for line in describe_start(
                recipe,
                stage=stage,
                place=ranks.place,
                data=data,
                plan=plan,
                task=task,
                head=start.head,
                notes=kernels.notes,
                restored=restored,
            ):
                report.note(line)
            context.draw(stage, "begin", state.step)
        with closing(job.batches), closing(job.saver):
            if plan.rollback and restored is None:
                job.saver.save(state)  # nothing else lies before the first trouble
            state = train(job, state)
        config = recipe.train_stage(stage)
        if not math.isfinite(loss := state.evaluation[config.judged_by("loss")]):
            raise TrainingFailed(
                f"the held-out loss after the last step, {state.step:,}, is {loss}; only the checkpoint is kept: lower "
                f"stages.{stage}.optimizer.lr or lengthen its schedule.warmup, then use --restart {stage}"
            )
        report.note(
            f"{stage}: training stood still for its checkpoints for {job.saver.stall_seconds:.1f} s, "
            f"{job.saver.stall_seconds / report.attempt_seconds:.1%} of the time"
        )
        watch.progress(state.step, status="writing the model")
        with engine.averaged() if config.ema and config.ema.model == "ema" else nullcontext():
            weights = engine.weights()
        if ranks.place.is_main:
            best = best_results(
                iter_metrics(folder.stage(stage) / METRICS_FILE),
                last=state.evaluation,
                by=_judged_by(config, task=task),
            )
            if best:
                report.note(f"{stage}: {describe_best(best, stage=stage, checkpoints=folder.checkpoints(stage))}")
            make_folders(folder.stage(stage), below=folder.path)  # fails where the run folder is gone
            save_for_others(folder.model(stage), weights, meta=meta)
            folder.update(
                stage,
                state="done",
                results={**state.evaluation, **best},
                model_digest=weights_digest(folder.model(stage)),
            )
            context.draw(stage, "end", state.step)


def make_pace(config: EngineConfig, *, device: torch.device, drawing_seconds: Callable[[], float]) -> Pace:
    """Measures and compares the ranks' speed."""
    return Pace(
        host=platform.node(),
        device=device,
        factor=config.slow_rank_factor,
        least_seconds=config.slow_rank_seconds,
        forward="shared" if config.backend == "deepspeed" and config.zero_stage == 3 else "own",
        drawing_seconds=drawing_seconds,
    )


def make_job(
    context: StageContext,
    *,
    stage: StageName,
    data: StageData,
    plan: StagePlan,
    task: Task,
    engine: Engine,
    state: TrainState,
    watch: Watch,
    report: Report,
) -> TrainJob:
    """Everything the loop needs, from `state` on."""
    recipe, folder, ranks = context.recipe, context.folder, context.ranks
    config = recipe.train_stage(stage)
    faults = FaultLedger(
        folder.stage(stage) / CORRUPT_SAMPLES_FILE,
        num_samples={
            "train": data.train.num_samples,
            "eval": data.eval.num_samples,
            **{f"eval {name}": one.num_samples for name, one in data.also_eval.items()},
        },
        max_share=recipe.data.max_corrupt_share,
    )
    stream = train_stream(recipe, stage=stage, data=data, plan=plan, place=ranks.place)
    held_out_parts = {
        name: held_out(recipe, stage=stage, data=data, shards=one, plan=plan, place=ranks.place)
        for name, one in data.held_out.items()
    }
    workers = data_workers(
        recipe, stage=stage, batches=stream, step=state.step, device=engine.device, ranks=ranks, say=report.note
    )

    def evaluate_all(at_step: int, *, of: WeightsKind) -> list[Evaluated]:
        found: list[Evaluated] = []
        for name, part in held_out_parts.items():
            with closing(held_out_loader(part, workers=workers, device=engine.device)) as batches:
                found.append(
                    evaluate(
                        batches,
                        task=task,
                        engine=engine,
                        ranks=ranks,
                        faults=faults,
                        of=of,
                        set_name=name,
                        metrics=asked_metrics(config, shards=data.held_out[name], stage=stage),
                        progress=lambda: watch.progress(at_step, status="evaluation"),
                    )
                )
        return found

    few_shot = few_shot_evaluation(
        context, stage=stage, plan=plan, data=data, engine=engine, workers=workers, watch=watch, say=report.note
    )

    def run_evaluation(at_step: int) -> dict[str, float]:
        found = kept = evaluate_all(at_step, of="weights")
        if config.ema:
            with engine.averaged():
                of_average = evaluate_all(at_step, of="ema")
            found, kept = [*found, *of_average], of_average if config.ema.model == "ema" else found
        metrics = {name: value for each in found for name, value in each.metrics.items()}
        metrics |= few_shot(at_step)
        if ranks.place.is_main:
            keep_evaluations(folder.stage(stage), kept, step=at_step, say=report.note)
            context.draw(stage, "evaluated", at_step)
            if at_step == plan.total_steps:
                for each in kept:
                    if each.record and (warning := one_answer(each.record)):
                        report.note(f"{stage}: {warning}")
        return metrics

    def committed(at: TrainState) -> None:
        if ranks.place.is_main:
            folder.update(stage, last_saved_step=at.step, images_seen=at.images_seen, seconds=at.training_seconds)
            report.event("checkpoint", f"step {at.step} is saved", step=at.step)

    return TrainJob(
        plan=plan,
        batches=train_loader(
            stream,
            start_step=state.step,
            stop_step=plan.total_steps,
            workers=workers,
            device=engine.device,
            passed_over=state.passed_over,
        ),
        task=task,
        engine=engine,
        evaluate=run_evaluation,
        saver=CheckpointSaver(
            folder.checkpoints(stage),
            engine=engine,
            ranks=ranks,
            identity=checkpoint_identity(recipe, stage=stage, processes=ranks.place.world_size),
            written_by=written_by() if ranks.place.is_main else {},  # who writes them down
            recipe_text=dump_recipe(recipe),
            inputs=folder.record(stage).inputs if ranks.place.is_main else {},
            retention=Retention(
                last=config.keep_checkpoints,
                every_steps=plan.keep_steps,
                best=_judged_by(config, task=task) if config.keep_best else None,
                reach_steps=plan.rollback_reach_steps,
            ),
            mode=recipe.engine.saving,
            say=report.note,
            on_commit=committed,
            progress=lambda step: watch.progress(step, status="saving a checkpoint"),
        ),
        faults=faults,
        report=report,
        ranks=ranks,
        requests=Requests(context.stop, saved_step=state.step, save_minutes=config.save_every_minutes),
    )


def _judged_by(config: TrainStage, *, task: Task) -> str:
    """The metric by which an evaluation is the best."""
    return config.judged_by("loss" if config.keep_best == "loss" else task.score)


def _check_disk(context: StageContext, *, stage: StageName, model: nn.Module) -> None:
    recipe = context.recipe
    needed_bytes = estimate_bytes(
        sum(parameter.numel() for parameter in model.parameters()),
        engine=recipe.engine,
        optimizer=recipe.train_stage(stage).optimizer,
        ema=recipe.train_stage(stage).ema,
    )
    check_free_space(context.folder.checkpoints(stage), needed_bytes=needed_bytes)

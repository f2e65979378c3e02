"""Make the parts of a stage's training from the recipe, connect them, and write the result."""

import math
from collections import Counter
from collections.abc import Callable
from contextlib import closing, nullcontext

import torch
from torch import nn

from shardvit.data_shards.durable import make_folders
from shardvit.data_shards.loading.device_prefetch import prefetch_to_device
from shardvit.data_shards.loading.loader import TrainLoader, eval_batches
from shardvit.data_shards.vocabulary import GOOGLES
from shardvit.model.formats.export import save_for_others
from shardvit.pipeline.budget.memory import copied_bytes
from shardvit.pipeline.checkpoint.disk_space import check_free_space, estimate_bytes
from shardvit.pipeline.checkpoint.identity import checkpoint_identity
from shardvit.pipeline.checkpoint.saver import CheckpointSaver, Origin, SaveHooks
from shardvit.pipeline.checkpoint.store import Retention
from shardvit.pipeline.checkpoint.train_state import TrainState
from shardvit.pipeline.engine.base import Engine
from shardvit.pipeline.evaluation.evaluate import Evaluated, evaluate, keep_evaluations
from shardvit.pipeline.evaluation.scores import one_answer
from shardvit.pipeline.own_code.by_path import load_own
from shardvit.pipeline.ranks.phases import Phases
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.ranks.stopping import Requests
from shardvit.pipeline.ranks.watch import Watch
from shardvit.pipeline.recipe.io import dump_recipe
from shardvit.pipeline.recipe.schema import EngineConfig
from shardvit.pipeline.recipe.stages.train_stage import TrainStage
from shardvit.pipeline.recipe.vocabulary import (
    CORRUPT_SAMPLES_FILE,
    MASTER_BYTES,
    METRICS_FILE,
    PROJECTION,
    WeightsKind,
)
from shardvit.pipeline.report.best import best_results, describe_best
from shardvit.pipeline.report.reporter import Report
from shardvit.pipeline.runs.logs import iter_metrics
from shardvit.pipeline.runs.run_folder import weights_digest
from shardvit.pipeline.runs.written_by import written_by
from shardvit.pipeline.stage.batches import held_out, train_stream
from shardvit.pipeline.stage.context import StageContext
from shardvit.pipeline.stage.damage import FaultLedger
from shardvit.pipeline.stage.data_workers import DataWorkers, data_workers
from shardvit.pipeline.stage.initial_model import StageStart, stage_model
from shardvit.pipeline.stage.stage_data import Stage, asked_metrics
from shardvit.pipeline.stage.task import Task
from shardvit.pipeline.training.after_step import TrainingFailed, TrainJob
from shardvit.pipeline.training.callbacks import Callbacks
from shardvit.pipeline.transfer.during_training import few_shot_evaluation


def make_job(
    context: StageContext,
    stage: Stage,
    *,
    task: Task,
    engine: Engine,
    state: TrainState,
    watch: Watch,
    report: Report,
) -> TrainJob:
    """Make what the loop needs to train from `state`; collective."""
    recipe, data, ranks = stage.recipe, stage.data, context.ranks
    sets = {"train": data.train, "eval": data.eval, **{f"eval {name}": one for name, one in data.also_eval.items()}}
    faults = FaultLedger(
        stage.folder / CORRUPT_SAMPLES_FILE,
        num_samples={name: one.num_samples for name, one in sets.items()},
        max_share=recipe.data.max_corrupt_share,
    )
    normalisation = getattr(task, "normalisation", GOOGLES)  # an own task may have none
    stream = train_stream(stage, place=ranks.place, own_code="run", normalisation=normalisation)
    workers = data_workers(
        recipe, stage=stage.name, batches=stream, step=state.step, device=engine.device, ranks=ranks, say=report.note
    )
    loader = TrainLoader(
        stream,
        start_step=state.step,
        stop_step=stage.plan.total_steps,
        passed_over=state.passed_over,
        workers=workers.count,
        kind=workers.kind,
    )
    evaluate = _make_evaluation(
        context, stage, task=task, engine=engine, faults=faults, workers=workers, watch=watch, report=report
    )
    saver = _make_saver(context, stage, task=task, engine=engine, watch=watch, report=report)
    if engine.device.type == "cuda":  # elsewhere memory is had in no time
        saver.prepare(_copied_bytes(stage, engine, place=ranks.place))
    return TrainJob(
        plan=stage.plan,
        batches=prefetch_to_device(loader, device=engine.device),
        task=task,
        engine=engine,
        evaluate=evaluate,
        saver=saver,
        faults=faults,
        report=report,
        ranks=ranks,
        callbacks=_make_callbacks(stage, task=task, state=state),
        requests=Requests(context.stop, saved_step=state.step, save_minutes=stage.config.save_every_minutes),
    )


def _make_callbacks(stage: Stage, *, task: Task, state: TrainState) -> Callbacks:
    """Make the user's callbacks in the state of the checkpoint."""
    called = {each.rpartition(":")[2]: load_own(each)() for each in stage.config.callbacks}
    stateful = {name: each for name, each in {**called, "task": task}.items() if hasattr(each, "state_dict")}
    callbacks = Callbacks(called, stateful, stage.name)
    callbacks.load(state.own)
    return callbacks


def _make_evaluation(
    context: StageContext,
    stage: Stage,
    *,
    task: Task,
    engine: Engine,
    faults: FaultLedger,
    workers: DataWorkers,
    watch: Watch,
    report: Report,
) -> Callable[[int], dict[str, float]]:
    """Make a function step -> metrics that also keeps what pictures need; collective."""
    ranks, ema = context.ranks, stage.config.ema
    own = {name: load_own(each) for name, each in stage.config.own_metrics.items()}
    parts = {name: held_out(stage, shards, place=ranks.place) for name, shards in stage.data.held_out.items()}
    few_shot = few_shot_evaluation(
        context,
        stage,
        engine=engine,
        workers=workers,
        watch=watch,
        say=report.note,
        normalisation=getattr(task, "normalisation", GOOGLES),
    )

    def evaluate_sets(step: int, *, of: WeightsKind) -> list[Evaluated]:
        found: list[Evaluated] = []
        for name, part in parts.items():
            loader = eval_batches(part, workers=workers.count, kind=workers.kind)
            metrics = asked_metrics(stage.config, shards=stage.data.held_out[name], stage=stage.name)
            with closing(prefetch_to_device(loader, device=engine.device)) as batches:
                found.append(
                    evaluate(
                        batches,
                        task=task,
                        ranks=ranks,
                        faults=faults,
                        of=of,
                        set_name=name,
                        metrics=metrics,
                        own=own,
                        progress=lambda: watch.progress(step, status="evaluation"),
                    )
                )
        return found

    def evaluate_stage(step: int) -> dict[str, float]:
        found = kept = evaluate_sets(step, of="weights")
        if ema:
            with engine.averaged():
                of_average = evaluate_sets(step, of="ema")
            found, kept = [*found, *of_average], of_average if ema.model == "ema" else found
        metrics = {name: value for each in found for name, value in each.metrics.items()}
        metrics |= few_shot(step)
        if ranks.place.is_main:
            keep_evaluations(stage.folder, kept, step=step, say=report.note)
            context.draw(stage.name, "evaluated", step)
            for each in kept if step == stage.plan.total_steps else ():
                if each.record and (warning := one_answer(each.record)):
                    report.note(f"{stage.name}: {warning}")
        return metrics

    return evaluate_stage


def _make_saver(
    context: StageContext, stage: Stage, *, task: Task, engine: Engine, watch: Watch, report: Report
) -> CheckpointSaver:
    recipe, config, ranks = stage.recipe, stage.config, context.ranks

    def committed(at: TrainState) -> None:
        if ranks.place.is_main:
            stage.update(last_saved_step=at.step, images_seen=at.images_seen, seconds=at.training_seconds)
            report.event("checkpoint", f"step {at.step} is saved", step=at.step)

    return CheckpointSaver(
        stage.checkpoints,
        engine=engine,
        ranks=ranks,
        origin=Origin(
            checkpoint_identity(recipe, stage=stage.name, processes=ranks.place.world_size),
            written_by=written_by() if ranks.place.is_main else {},  # rank 0 records them
            inputs=stage.record.inputs if ranks.place.is_main else {},
            recipe_text=dump_recipe(recipe),
        ),
        retention=Retention(
            last=config.keep_checkpoints,
            every_steps=stage.plan.keep_steps,
            best=judged_by(config, task=task) if config.keep_best else None,
            reach_steps=stage.plan.rollback_reach_steps,
        ),
        mode=recipe.engine.saving,
        hooks=SaveHooks(report.note, committed, lambda step: watch.progress(step, status="saving a checkpoint")),
    )


def _copied_bytes(stage: Stage, engine: Engine, *, place: Place) -> int:
    """Host memory that a background save of this rank will take: most of the state does not exist yet."""
    config, counts = stage.recipe.engine, Counter[bool]()
    for each in engine.module.parameters():
        counts[each.requires_grad] += getattr(each, "ds_numel", each.numel())  # ZeRO 3's are empty between passes
    first, other = copied_bytes(
        counts[True],
        engine=config,
        optimizer=stage.config.optimizer,
        ema=stage.config.ema,
        zero_stage=config.zero_stage,
        processes=place.world_size,
    )
    return first + MASTER_BYTES * counts[False] if place.is_main else other


def judged_by(config: TrainStage, *, task: Task) -> str:
    """Name the metric of the best evaluation."""
    by = config.keep_best
    return config.judged_by(task.score if by is None or by == "score" else by)


def make_phases(context: StageContext, config: EngineConfig, *, watch: Watch, device: torch.device) -> Phases:
    """Make the timer of steps, which also compares the ranks' speed."""
    return Phases(
        watch=watch,
        device=device,
        factor=config.slow_rank_factor,
        least_seconds=config.slow_rank_seconds,
        forward="shared" if config.backend == "deepspeed" and config.zero_stage == 3 else "own",
        drawing_seconds=context.drawing_seconds,
        start=context.start,
    )


def check_disk(stage: Stage, *, model: nn.Module) -> None:
    """UserError if a checkpoint does not fit on the disk."""
    needed_bytes = estimate_bytes(
        sum(parameter.numel() for parameter in model.parameters()),
        engine=stage.recipe.engine,
        optimizer=stage.config.optimizer,
        ema=stage.config.ema,
    )
    check_free_space(stage.checkpoints, needed_bytes=needed_bytes)


def write_result(context: StageContext, stage: Stage, *, job: TrainJob, state: TrainState, start: StageStart) -> None:
    """Write the model and mark the stage done; collective. TrainingFailed if the last held-out loss is not finite."""
    config, name, model, report = stage.config, stage.name, stage.run.model(stage.name), job.report
    if not math.isfinite(loss := state.evaluation[config.judged_by("loss")]):
        raise TrainingFailed(
            f"the held-out loss after the last step, {state.step:,}, is {loss}; only the checkpoint is kept: lower "
            f"stages.{name}.optimizer.lr or lengthen its schedule.warmup, then use --restart {name}"
        )
    report.note(
        f"{name}: training stood still for its checkpoints for {job.saver.stall_seconds:.1f} s, "
        f"{job.saver.stall_seconds / report.attempt_seconds:.1%} of the time"
    )
    with job.engine.averaged() if config.ema and config.ema.model == "ema" else nullcontext():
        weights = job.engine.weights()
    if not context.ranks.place.is_main:
        return
    rows = iter_metrics(stage.folder / METRICS_FILE)
    best = best_results(rows, last=state.evaluation, by=judged_by(config, task=job.task))
    if best:
        report.note(f"{name}: {describe_best(best, stage=name, checkpoints=stage.checkpoints)}")
    weights = {name: each for name, each in weights.items() if not name.startswith(f"{PROJECTION}.")}
    make_folders(stage.folder, below=stage.run.path)  # fails if the run folder is gone
    meta = stage_model(stage.recipe, stage=name, classes=job.task.outputs, start=start)
    save_for_others(model, weights, meta=meta)
    stage.update(state="done", results={**state.evaluation, **best}, model_digest=weights_digest(model))
    context.draw(name, "end", state.step)

"""The parts of one stage's training, made from the recipe and put together for the loop. Assembly only."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator

from data_shards.images.decode import PixelLimit
from data_shards.loading.assemble import Access
from data_shards.loading.batch import Batch
from data_shards.loading.loader import EvalBatches, Layout, TrainBatches, TrainLoader, eval_batches
from data_shards.shard_set import ShardSet
from pipeline.checkpoint.identity import checkpoint_identity
from pipeline.checkpoint.saver import CheckpointSaver
from pipeline.checkpoint.store import Restored, Retention
from pipeline.checkpoint.written_by import written_by
from pipeline.context import StageContext
from pipeline.engine.protocol import Engine
from pipeline.evaluate import evaluate
from pipeline.faults import FILE as FAULTS_FILE
from pipeline.faults import FaultLedger
from pipeline.images import eval_transform, mixup, train_transform
from pipeline.ranks.pace import Pace
from pipeline.ranks.stopping import SaveClock
from pipeline.ranks.watch import Watch
from pipeline.recipe.io import dump_recipe
from pipeline.recipe.schedule import Schedule
from pipeline.recipe.schema import Recipe, StageName
from pipeline.recipe.stage_plan import StagePlan
from pipeline.report.reporter import Report
from pipeline.stage_data import StageData, training_order
from pipeline.state import TrainState
from pipeline.task import Task
from pipeline.train_loop import TrainJob


def training_job(
    context: StageContext,
    *,
    stage: StageName,
    data: StageData,
    plan: StagePlan,
    task: Task,
    engine: Engine,
    restored: Restored | None,
    watch: Watch,
    report: Report,
) -> TrainJob:
    """Everything the loop needs, from the restored step on."""
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

    step = restored.state.step if restored else 0
    best = {None: None, "loss": "val/loss", "score": f"val/{task.score}"}[config.keep_best]

    def run_evaluation(at_step: int) -> dict[str, float]:
        return evaluate(
            _beating(
                eval_batches(held_out, workers=recipe.data.workers, kind=recipe.data.kind_of_workers),
                watch=watch,
                step=at_step,
            ),
            task=task,
            engine=engine,
            ranks=ranks,
            faults=faults,
        )

    def committed(at: TrainState) -> None:
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
            start_step=step,
            stop_step=plan.total_steps,
            workers=recipe.data.workers,
            kind=recipe.data.kind_of_workers,
        ),
        faults=faults,
        task=task,
        evaluate=run_evaluation,
        saver=CheckpointSaver(
            folder.checkpoints(stage),
            engine=engine,
            ranks=ranks,
            identity=checkpoint_identity(recipe, stage=stage, processes=ranks.place.world_size),
            written_by=written_by() if ranks.place.is_main else {},  # who writes them down
            recipe_text=dump_recipe(recipe),
            inputs=folder.record(stage).inputs if ranks.place.is_main else {},
            retention=Retention(last=config.keep_checkpoints, every_steps=plan.keep_steps, best=best),
            mode=recipe.engine.saving,
            say=report.note,
            on_commit=committed,
            beat=lambda step: watch.beat(step, doing="saving a checkpoint"),
        ),
        save_clock=SaveClock(config.save_every_minutes),
        save_after="steps and evaluations" if config.keep_best else "steps",
        pace=Pace(
            host=platform.node(),
            device=engine.device,
            factor=recipe.engine.slow_rank_factor,
            forward="shared" if recipe.engine.backend == "deepspeed" and recipe.engine.zero_stage == 3 else "own",
        ),
        on_slow_rank=recipe.engine.slow_rank,
        watch=watch,
        report=report,
        stop=context.stop,
    )


def _beating(batches: Iterable[Batch], *, watch: Watch, step: int) -> Iterator[Batch]:
    for batch in batches:
        watch.beat(step, doing="evaluation")
        yield batch


def _access(shards: ShardSet, *, data: StageData, recipe: Recipe) -> Access:
    on_corrupt = "substitute" if recipe.data.max_corrupt_share > 0 else "stop"
    return Access(
        shards,
        store=data.store,
        decoder=recipe.data.decoder,
        pixel_limit=PixelLimit(recipe.data.max_image_pixels),
        on_corrupt=on_corrupt,
    )

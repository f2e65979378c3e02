"""Evaluate a stage while it trains: its held-out sets, also with averaged weights, and its few-shot sets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from data_shards.loading.device_prefetch import prefetch_to_device
from data_shards.loading.loader import eval_batches
from pipeline.engine.base import Engine
from pipeline.evaluation.evaluate import Evaluated, evaluate, keep_evaluations
from pipeline.evaluation.scores import one_answer
from pipeline.ranks.watch import Watch
from pipeline.recipe.vocabulary import WeightsKind
from pipeline.report.reporter import Report
from pipeline.stage.batches import held_out
from pipeline.stage.context import StageContext
from pipeline.stage.damage import FaultLedger
from pipeline.stage.data_workers import DataWorkers
from pipeline.stage.stage_data import Stage, asked_metrics
from pipeline.stage.task import Task
from pipeline.transfer.during_training import few_shot_evaluation


def stage_evaluation(
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
    """Make a function of the step that evaluates, keeps what the pictures need, and returns the metrics; collective."""
    ranks, ema = context.ranks, stage.config.ema
    parts = {name: held_out(stage, shards, place=ranks.place) for name, shards in stage.data.held_out.items()}
    few_shot = few_shot_evaluation(context, stage, engine=engine, workers=workers, watch=watch, say=report.note)

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

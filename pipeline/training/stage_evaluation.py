"""The evaluation of a stage while it trains: its held-out sets, their moving average, its few-shot sets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from pipeline.engine.base import Engine
from pipeline.evaluation.evaluate import Evaluated, evaluate, keep_evaluations
from pipeline.evaluation.scores import one_answer
from pipeline.ranks.watch import Watch
from pipeline.recipe.vocabulary import WeightsKind
from pipeline.report.reporter import Report
from pipeline.stage.batches import held_out, held_out_loader
from pipeline.stage.context import StageContext
from pipeline.stage.damage import FaultLedger
from pipeline.stage.data_workers import DataWorkers
from pipeline.stage.stage_data import Stage, asked_metrics
from pipeline.stage.task import Task
from pipeline.transfer.during_training import few_shot_evaluation


class StageEvaluation:
    """Called with a step: evaluates, keeps what the pictures need, and returns the metrics; collective."""

    def __init__(
        self,
        context: StageContext,
        stage: Stage,
        *,
        task: Task,
        engine: Engine,
        faults: FaultLedger,
        workers: DataWorkers,
        watch: Watch,
        report: Report,
    ) -> None:
        self._context, self._stage, self._task, self._engine = context, stage, task, engine
        self._faults, self._workers, self._watch, self._report = faults, workers, watch, report
        place = context.ranks.place
        self._parts = {name: held_out(stage, shards, place=place) for name, shards in stage.data.held_out.items()}
        self._few_shot: Callable[[int], dict[str, float]] = few_shot_evaluation(
            context, stage, engine=engine, workers=workers, watch=watch, say=report.note
        )

    def __call__(self, step: int) -> dict[str, float]:
        stage, report, ema = self._stage, self._report, self._stage.config.ema
        found = kept = self._evaluate(step, of="weights")
        if ema:
            with self._engine.averaged():
                of_average = self._evaluate(step, of="ema")
            found, kept = [*found, *of_average], of_average if ema.model == "ema" else found
        metrics = {name: value for each in found for name, value in each.metrics.items()}
        metrics |= self._few_shot(step)
        if self._context.ranks.place.is_main:
            keep_evaluations(stage.folder, kept, step=step, say=report.note)
            self._context.draw(stage.name, "evaluated", step)
            if step == stage.plan.total_steps:
                for each in kept:
                    if each.record and (warning := one_answer(each.record)):
                        report.note(f"{stage.name}: {warning}")
        return metrics

    def _evaluate(self, step: int, *, of: WeightsKind) -> list[Evaluated]:
        stage, found = self._stage, list[Evaluated]()
        for name, part in self._parts.items():
            with closing(held_out_loader(part, workers=self._workers, device=self._engine.device)) as batches:
                found.append(
                    evaluate(
                        batches,
                        task=self._task,
                        ranks=self._context.ranks,
                        faults=self._faults,
                        of=of,
                        set_name=name,
                        metrics=asked_metrics(stage.config, shards=stage.data.held_out[name], stage=stage.name),
                        progress=lambda: self._watch.progress(step, status="evaluation"),
                    )
                )
        return found
